# `. ./tools/gpu_environment.sh`, in the repository's folder: for machines where nothing can be installed. Unpacks what
# PYTHON lacks from the wheels in build/gpu_day/wheels (tools/gpu_wheels.sh) into build/gpu_day/extra, on PYTHONPATH.
mkdir -p build/gpu_day/extra
if [ ! -e build/gpu_day/extra/.installed ] && ls build/gpu_day/wheels/*.whl >/dev/null 2>&1; then
    if "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target build/gpu_day/extra build/gpu_day/wheels/*.whl; then
        touch build/gpu_day/extra/.installed
    else
        echo "wheels could not be installed; what needs them will say so" >&2
    fi
fi
# PyAV's wheel is too large to carry, and nothing there decodes sound: an empty folder lets services start.
"$PYTHON" -c 'import av' 2>/dev/null || mkdir -p build/gpu_day/extra/av
export PYTHONPATH="$PWD/build/gpu_day/extra${PYTHONPATH:+:$PYTHONPATH}"
