#!/usr/bin/env bash
# A workload on a GKE cluster that xpk made; the image holds papyrax with the extras all and tpu.
# usage: xpk.sh CLUSTER TPU_TYPE IMAGE NAME SYSTEM [papyrax run arguments …]   e.g. research v5litepod-256 my/papyrax:1 reppo-1 reppo --preset paper
set -euo pipefail
cluster=$1 tpu=$2 image=$3 name=$4 system=$5
shift 5
xpk workload create --cluster "$cluster" --workload "$name" --tpu-type "$tpu" --docker-image "$image" --max-restarts 10 \
  --command "papyrax run $system $* --distributed --run-dir /mnt/runs/$name"
