#!/usr/bin/env bash
# One queued TPU slice: asks for it, waits, installs papyrax on every host, runs. Needs gcloud, a project and a bucket mounted at /mnt/runs.
# usage: queued_resource.sh NAME ZONE ACCELERATOR SYSTEM [papyrax run arguments …]   e.g. reppo-1 us-central1-a v5litepod-256 reppo --preset paper
set -euo pipefail
name=$1 zone=$2 accelerator=$3 system=$4
shift 4
gcloud compute tpus queued-resources create "$name" --node-id "$name" --zone "$zone" --accelerator-type "$accelerator" --runtime-version v2-alpha-tpuv5-lite --spot
until [ "$(gcloud compute tpus queued-resources describe "$name" --zone "$zone" --format='value(state.state)')" = ACTIVE ]; do sleep 30; done
gcloud compute tpus tpu-vm scp --recurse --zone "$zone" --worker=all . "$name":papyrax
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "
  cd papyrax && python3 -m venv .venv && .venv/bin/pip install --quiet '.[all,tpu]' &&
  .venv/bin/papyrax run $system $* --distributed --run-dir /mnt/runs/$name"
