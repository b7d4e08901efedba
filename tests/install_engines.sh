#!/usr/bin/env bash
# Slurm, Open MPI, sshd, Ray, Accelerate and DeepSpeed for the tests of the engines, as far as they can be had
# (Debian, root); tests of what is missing are skipped. The Python packages go into a folder of their own ($1).
packages="slurm-wlm munge openmpi-bin openssh-server"
if ! { command -v slurmctld && command -v munged && command -v mpirun && command -v sshd; } >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install() { timeout 600 apt-get install -y -q --no-install-recommends $packages >/dev/null 2>&1; }
    install || { timeout 300 apt-get update -q >/dev/null 2>&1 && install; }
  fi
  command -v slurmctld >/dev/null || echo "not installed ($packages): the tests that need them are skipped"
fi
python=$(dirname "$0")/../.venv/bin/python
timeout 600 "$python" -m pip install --quiet --upgrade --target "$1" "ray>=2.40,<3" >/dev/null 2>&1 ||
  echo "not installed (ray): the tests that need it are skipped"
# Without what they depend on: another torch. What their launchers import of it by name.
imported="huggingface_hub safetensors packaging pyyaml psutil einops hjson ninja msgpack py-cpuinfo pydantic tqdm filelock"
{ timeout 300 "$python" -m pip install --quiet --upgrade --target "$1" $imported &&
  timeout 600 "$python" -m pip install --quiet --upgrade --target "$1" --no-deps "accelerate>=1,<2" "deepspeed>=0.16,<1"; } \
  >/dev/null 2>&1 || echo "not installed (accelerate, deepspeed): the tests that need them are skipped"
exit 0
