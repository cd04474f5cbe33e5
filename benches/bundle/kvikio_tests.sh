#!/usr/bin/env bash
# Runs kvikio's own Python tests of CuFile, streams and the driver, unmodified, with this libcufile and
# KVIKIO_COMPAT_MODE=OFF, on a machine with a GPU (Python with cupy and numpy). Prints text.
#
# usage: kvikio_tests.sh FOLDER
#   FOLDER/tests   python/kvikio/tests of the kvikio repository, at the commit of the wheels
#   FOLDER/*.whl   kvikio, libkvikio, rmm, librmm, rapids_logger; pytest, pluggy, iniconfig, packaging, pygments
#                  (what is not there is looked for in WHEELS, ../.whl without it)
#   FOLDER/basic_io  kvikio's C++ example of batches, built there, if it is to run as well
# env: FILES=where files are made (/tmp/beeline-kvikio)   SECONDS_MAX=60, for the largest part
set -uo pipefail
folder=$(cd "${1:?usage: kvikio_tests.sh FOLDER}" && pwd)
cd "$(dirname "$0")"
here=$PWD
wheels=${WHEELS:-$here/../.whl}
files=${FILES:-/tmp/beeline-kvikio}
site=/tmp/beeline-kvikio-site
out=${OUT:-$here/results}
mkdir -p "$files" "$site" "$out" lib
cp -f libcufile.so.0 lib/libcufile.so.0
ln -sf libcufile.so.0 lib/libcufile.so
began=$SECONDS
note() { printf '\n== [%3d s] %s\n' $((SECONDS - began)) "$*"; }

for wheel in "$folder"/*.whl "$wheels"/*.whl; do
    case $(basename "$wheel") in
    kvikio* | libkvikio* | rmm* | librmm* | rapids_logger* | pytest* | pluggy* | iniconfig* | packaging* | pygments*)
        python3 -m zipfile -e "$wheel" $site ;;
    esac
done
# The marker is all that the tests need of the repository's own settings.
printf '[pytest]\nmarkers =\n    cufile: needs cuFile\n' >$site/pytest.ini
printf '{ "logging": { "level": "WARN" } }\n' >$site/cufile.json
nv=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
path=$site/libkvikio/lib64:$site/librmm/lib64:$site/rapids_logger/lib64:$here/lib
for lib in "$nv"/cu13/lib "$nv"/cuda_runtime/lib; do
    [ -d "$lib" ] && path=$path:$lib
done
export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1
export KVIKIO_COMPAT_MODE=OFF CUFILE_ENV_PATH_JSON=$site/cufile.json BEELINE_LOG=warn
ours=$here/lib/libcufile.so.0

note "kvikio's tests with $(cat COMMIT 2>/dev/null) on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
LD_PRELOAD=$ours timeout -k 5 30 python3 - <<'END'
import cupy, kvikio, kvikio.cufile_driver, kvikio.defaults, numpy, pytest, sys
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libcufile" in line}
print("python", sys.version.split()[0], "cupy", cupy.__version__, "numpy", numpy.__version__, "pytest", pytest.__version__)
print("kvikio", kvikio.__version__, "compat mode", kvikio.defaults.get("compat_mode"),
      "cuFile", kvikio.cufile_driver.libcufile_version(), *sorted(libraries))
END

tests() { # name seconds file..
    local name=$1 seconds=$2
    shift 2
    note "$name"
    (cd "$folder/tests" && LD_PRELOAD=$ours timeout -k 5 "$seconds" python3 -m pytest -c $site/pytest.ini --rootdir "$folder/tests" \
        -p no:cacheprovider --basetemp "$files/tmp" -q -rsxX --tb=short --maxfail=12 "$@") >"$out/kvikio-$name.log" 2>&1
    local rc=$?
    grep -v '^[.sFEx]* *\[' "$out/kvikio-$name.log" | tail -40
    echo "exit code $rc"
}
tests streams 25 test_async_io.py
tests driver 20 test_cufile_driver.py test_defaults.py
tests files "${SECONDS_MAX:-60}" test_basic_io.py test_numpy.py test_mmap.py

if [ -x "$folder/basic_io" ]; then
    note "kvikio's C++ example: files, a batch, a cancelled batch, streams"
    (cd "$files" && LD_PRELOAD=$ours timeout -k 5 20 "$folder/basic_io") 2>&1 | tail -30
    echo "exit code ${PIPESTATUS[0]}"
fi
rm -rf "$files" $site
note "kvikio's tests done"
