#!/usr/bin/env bash
# All experiments of the spike, one after another; results as JSON into $1. Two GPUs; MODEL is a Hugging Face folder.
out=$1
for name in ${NAMES:-push kill ipc ipc7b tp2}; do
  echo "== $name"
  timeout "${LIMIT:-150}" python3 -m benchmarks.spikes.gpu_seams.driver "$name" --model "$MODEL" --out "$out/$name.json" >"$out/$name.log" 2>&1
  echo "rc $?"; grep -v "^INFO\|WARNING\|(EngineCore" "$out/$name.log" | tail -${TAIL:-45} | cut -c1-220
done
