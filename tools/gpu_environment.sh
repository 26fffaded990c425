# `. ./tools/gpu_environment.sh`, in the repository's folder: where nothing can be installed, what PYTHON lacks lies in
# build/gpu_day/extra, out of the wheels in build/gpu_day/wheels (tools/gpu_wheels.sh), and PYTHONPATH leads there.
mkdir -p build/gpu_day/extra
if [ ! -e build/gpu_day/extra/.installed ] && ls build/gpu_day/wheels/*.whl >/dev/null 2>&1; then
    if "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target build/gpu_day/extra build/gpu_day/wheels/*.whl; then
        touch build/gpu_day/extra/.installed
    else
        echo "wheels could not be installed; what needs them will say so" >&2
    fi
fi
# PyAV's wheel is too large to be carried beside the rest. Nothing there decodes a sound: an empty folder lets services start.
"$PYTHON" -c 'import av' 2>/dev/null || mkdir -p build/gpu_day/extra/av
export PYTHONPATH="$PWD/build/gpu_day/extra${PYTHONPATH:+:$PYTHONPATH}"
