// Detect with an ONNX file of `gw-detectron export --format onnx`, in OpenVINO, without Python.
//
//     detect model.onnx image.ppm RGB
//
// prints a line for each object: class, score, and x0 y0 x1 y1 in pixels of the image. RGB or BGR is the order of the
// model's channels: INPUT.FORMAT of its config, `channels` in parity.json beside the file. The image is not resized:
// give it at the size of evaluation. docs/export.md has the command that compiles this file.
#include <fstream>
#include <iostream>
#include <openvino/openvino.hpp>

int main(int argc, char** argv) {
    const std::string order = argc == 4 ? argv[3] : "";
    if (order != "RGB" && order != "BGR") return std::cerr << "usage: detect model.onnx image.ppm RGB|BGR\n", 2;
    std::ifstream file(argv[2], std::ios::binary);
    std::string magic;
    size_t width = 0, height = 0, top = 0;
    if (!(file >> magic >> width >> height >> top) || magic != "P6" || top != 255)
        return std::cerr << argv[2] << ": no binary PPM of 8 bits\n", 1;
    file.get();  // one white space before the pixels
    std::vector<unsigned char> pixels(height * width * 3);
    if (!file.read(reinterpret_cast<char*>(pixels.data()), pixels.size()))
        return std::cerr << argv[2] << ": shorter than its size says\n", 1;

    ov::Core core;
    auto model = core.compile_model(argv[1], "CPU", ov::hint::inference_precision(ov::element::f32));
    ov::Tensor images(ov::element::f32, {1, 3, height, width}), sizes(ov::element::i64, {1, 2});
    for (size_t channel = 0; channel < 3; ++channel)  // RGB pixels to planes in the model's order
        for (size_t i = 0; i < height * width; ++i)
            images.data<float>()[channel * height * width + i] = pixels[3 * i + (order == "RGB" ? channel : 2 - channel)];
    sizes.data<int64_t>()[0] = height;
    sizes.data<int64_t>()[1] = width;

    auto request = model.create_infer_request();
    request.set_tensor("images", images);
    request.set_tensor("sizes", sizes);
    request.infer();
    const float* boxes = request.get_tensor("boxes").data<float>();
    const float* scores = request.get_tensor("scores").data<float>();
    const int64_t* classes = request.get_tensor("classes").data<int64_t>();
    for (int64_t i = 0; i < request.get_tensor("count").data<int64_t>()[0]; ++i)
        std::cout << classes[i] << ' ' << scores[i] << ' ' << boxes[4 * i] << ' ' << boxes[4 * i + 1] << ' '
                  << boxes[4 * i + 2] << ' ' << boxes[4 * i + 3] << '\n';
}
