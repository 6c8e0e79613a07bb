#!/bin/bash
# Run the study of PLAN.md, or continue it: bash run.sh BCCD NUCLEI OUTPUT [JOBS] [A B C D E F G]; DEVICE=cpu without a GPU
set -u
bccd=$1 nuclei=$2 output=$3 jobs=${4:-12}
here=$(dirname "$0")
read -r -a parts <<< "${*:5}"
export OMP_NUM_THREADS=1

compare() {  # part, config, folder, files that train, choose and score, norms and options
    local part=$1 config=$2 data=$3 train=$4 val=$5 test=$6
    [[ ${#parts[@]} -eq 0 || " ${parts[*]} " == *" $part "* ]] || return 0
    python3 -m gw_detectron compare --config-file "$here/$config" --output "$output/$part" --jobs "$jobs" \
        --train-json "$data/$train.json" --train-images "$data/images" --val-json "$data/$val.json" \
        --val-images "$data/images" --test-json "$data/$test.json" --test-images "$data/images" "${@:7}"
}

all="--seeds 3 --iterations 400 --no-equal-time --norms BN GN GW GW:iters=3 GN+WS"
keys="TEST.EVAL_PERIOD 0 MODEL.DEVICE ${DEVICE:-cuda}"
compare A bccd.yaml "$bccd" train val test --rates 0.005 0.01 0.02 0.04 $all -- $keys
compare B nuclei.yaml "$nuclei" fit tune val --rates 0.01 0.02 0.04 0.08 $all -- $keys
compare F bccd.yaml "$bccd" train val test --rates 0.02 0.04 0.08 0.16 $all -- $keys
compare C bccd.yaml "$bccd" train val test --rates 0.02 0.04 0.08 0.16 --seeds 3 --iterations 400 --no-equal-time \
    --ignore-preflight --norms BN+GW@S1-B1 FrozenBN -- $keys
compare E bccd.yaml "$bccd" train val test --rates 0.01 0.02 0.04 0.08 --seeds 2 --iterations 800 --no-equal-time \
    --ignore-preflight --norms BN GW -- SOLVER.IMS_PER_BATCH 1 $keys
compare D bccd.yaml "$bccd" train val test --rates 0.02 0.04 0.08 --seeds 1 --iterations 400 --no-equal-time \
    --norms GW:iters=1 GW:iters=2 GW:solver=zca GW:solver=zca_max,threshold=0.05 -- $keys
compare G bccd.yaml "$bccd" train val test --rates 0.04 --seeds 3 --iterations 400 --norms BN GN GW GW:iters=3 GW:iters=2 -- $keys
