#!/usr/bin/env bash
# All that a GPU must show, in ten minutes: each step has a limit and a log, and none stops the others.
#
#     OUT=/tmp/on_gpu bash tests/benchmarks/on_gpu.sh          # an NVIDIA GPU; DEVICE=xpu or mps: others
#     DEVICE=fakegpu ONLY=perceptron bash tests/benchmarks/on_gpu.sh    # a rehearsal without a GPU
#
# It has not run on a GPU yet. The last line says which steps failed. PATIENCE multiplies the limits.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
export DEVICE=${DEVICE:-cuda} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-$(mktemp -d)} python=${PYTHON:-python3} failed=()
mkdir -p "$out"
step() { # name, seconds, command
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "=== $name"
    timeout -k 5 "$((limit * ${PATIENCE:-1}))" "$@" >"$out/$name.log" 2>&1
    local rc=$?
    tail -n 60 "$out/$name.log" | cut -c1-260
    echo "=== $name: exit $rc after $((SECONDS - start)) s"
    # Logs of a killed step may be long; a step that only measures fails where a line says so.
    [ $rc = 0 ] && ! grep -q '^FAILED' "$out/$name.log" || failed+=("$name")
}
tests() { "$python" -m pytest -q -rfE -W default -p no:cacheprovider "$@"; }
export -f tests
export python

step machine 20 bash -c "{ nvidia-smi || true; } 2>&1; git log --oneline -1; $python -m pip list 2>/dev/null |
    grep -iE '^(torch|cupy|nvidia-cuda-nvrtc|numpy|numba|dask|xarray|zarr|transformers|traker|fast)' || true"
# The CUDA kernels, and what is marked as in need of a GPU elsewhere.
step kernels 130 bash -c 'tests -m gpu tests/projection/cuda/test_gpu.py tests/featurization/test_devices.py tests/arrays/test_xp.py'
# Bits of all projectors, engines and models against the CPU, fits, parts, threads.
step devices 190 env TESTS_WITH="$DEVICE" bash -c "tests tests/devices/test_gradients.py tests/devices/test_pipeline.py -k '${ONLY:-test}'"
step speed 240 "$python" tests/benchmarks/on_gpu.py "$DEVICE"
echo "failed: ${failed[*]:-none}; logs are in $out"
[ ${#failed[@]} = 0 ]
