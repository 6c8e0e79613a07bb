#!/usr/bin/env bash
# Test and measure a GPU in about eight minutes: bash benchmarks/gpu.sh OUTPUT. Tables and logs are written as they come.
# DEVICE=cpu: the same commands with tiny sizes, without CUDA graphs, to see that they run.
set -u
output=${1:?"OUTPUT: the folder for tables and logs"}
device=${DEVICE:-cuda}
slowness=1
python=${PYTHON:-python3}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
cd "$(dirname "$0")/.."
mkdir -p "$output"
failed=()

part() {  # name, seconds at most, command
    local name=$1 limit=$(($2 * slowness)) start=$SECONDS status=0
    timeout "$limit" "${@:3}" > "$output/$name.log" 2>&1 || status=$?
    echo "$name: exit status $status after $((SECONDS - start)) of $limit s; $(tail -n 1 "$output/$name.log" | cut -c 1-100)"
    return $status
}

measure() {  # name, seconds at most, words for tools/benchmark.py
    part "$1" "$2" "$python" tools/benchmark.py "${@:3}" --device "$device" --output "$output/$1" || failed+=("$1")
}

pytest=("$python" -m pytest -q -n 6 -p no:cacheprovider)
if [[ $device == cuda ]]; then
    part operator 130 "${pytest[@]}" -m gpu tests/ops/test_op_on_gpu.py &
    part kernels_right 130 env TRITON_INTERPRET=0 "${pytest[@]}" -o "python_functions=check_*" tests/ops/test_triton_kernels.py \
        || failed+=(kernels_right)
    wait $! || failed+=(operator)
    layer=(--repeats 20)
    model=(--repeats 20 --batch-size 2 --image-size 1024 --detector-image 800)
    graphs=(R-50-graph)
    detectors=(mask_rcnn_R-50 mask_rcnn_R-50-graph)
    kernels=()
else
    slowness=5
    layer=(--repeats 1 --shapes 1x64x8x8)
    model=(--repeats 1 --batch-size 1 --image-size 64 --detector-image 64)
    graphs=()
    detectors=(mask_rcnn_R-50)
    kernels=(--compile-only 90 --shapes 1x64x8x8)
fi

measure layer_16 60 layer --dtypes fp32 bf16 --batch-scale 8 "${layer[@]}"
measure layer_2 60 layer --dtypes fp32 bf16 "${layer[@]}"
measure kernels 60 kernels "${kernels[@]}"
measure kernels_channels_last 40 kernels --channels-last "${kernels[@]}"
measure network 60 model --models R-50 "${graphs[@]}" --variants GN GW-S1-B2 GW-ALL MixGW-S1-B2 "${model[@]}"
measure network_bf16 60 model --models R-50 "${graphs[@]}" --variants GN GW-S1-B2 GW-ALL --dtype bf16 "${model[@]}"
measure detector 60 model --models "${detectors[@]}" "${model[@]}"
measure detector_bf16 60 model --models "${detectors[@]}" --dtype bf16 "${model[@]}"
# last, as compilation takes long; without a GPU, a slow test compiles a smaller network
[[ $device == cpu ]] || measure compiled 120 model --models R-50-compiled --variants GW-ALL "${model[@]}"

[[ ${#failed[@]} -eq 0 ]] || { echo "Failed: ${failed[*]}"; exit 1; }
