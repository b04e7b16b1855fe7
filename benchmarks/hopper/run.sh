#!/usr/bin/env bash
# All measurements on one Hopper GPU, the most important first: benchmarks/hopper/run.sh DIR. It needs no network.
# Each program has a time limit, 24 minutes in all without `text`, and writes DIR/<part>.json and DIR/<part>.log, which
# ends with its table; `text` writes runs of train.py to DIR/text, and with WEIGHTS=FILE.gguf in the environment,
# `retrofit` those of experiments.published to DIR/retrofit. The same command again resumes: finished rows are not
# repeated.
set -u -o pipefail
mkdir -p "${1:?usage: run.sh DIR}" && out=$(realpath "$1") && cd "$(dirname "$0")/../.." || exit
export PYTHONUNBUFFERED=1 JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-/tmp/sympow-jax-compiled}"
export XDG_CACHE_HOME="$out/verdict"  # the check's verdict, without which training does not use the kernels
failed=0

part() {  # NAME SECONDS ARGUMENTS of python
    echo "== $1: at most $2 s"
    timeout -s INT -k 10 "$2" python "${@:3}" --out="$out/$1.json" 2>&1 | tee "$out/$1.log" || failed=1
}

# A check cannot resume, and takes up to 450 s; a wrong kernel is a result.
[ -e "$out/check.json" ] || part check 480 -c "import sys; from sympow_jax import commands; \
    sys.exit(commands.main(sys.argv[1:]))" check --brief
part kernels 420 -m benchmarks.kernels --part=brief --jobs=8 --resume --minutes=6.3
part chunks 150 -m benchmarks.kernels --part=chunks --jobs=8 --resume --minutes=1.8
part training 240 -m benchmarks.training --context={65536,16384,4096} --preset={conformal,softmax} \
    --jobs=3 --resume --minutes=3.3
part scanned 120 -m benchmarks.training --context=4096 --preset=conformal --scan-layers --resume --minutes=1.8
# 300 updates of each preset on the bytes of the standard library, evaluated beyond the training context.
for preset in conformal softmax sympow_gated sympow; do
    echo "== text/$preset: at most 225 s"
    timeout -s INT -k 10 225 python train.py --config=configs/gpt2_124m.py:$preset,context=16384 \
        --workdir="$out/text/$preset" --config.model.vocab_size=256 --config.data.source=text --config.data.paths= \
        --config.data.heldout_paths= --config.data.batch_tokens=65536 --config.optimizer.warmup_steps=50 \
        --config.training.steps=300 --config.evaluation.documents=16 2>&1 | tee -a "$out/text-$preset.log" || failed=1
done
if [ -n "${WEIGHTS:-}" ]; then
    python -m experiments.published --scale=gpu --weights="$WEIGHTS" --out="$out/retrofit" 2>&1 |
        tee -a "$out/retrofit.log" || failed=1
fi
exit "$failed"
