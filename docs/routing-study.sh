#!/usr/bin/env bash
# Every table of docs/routing-study.md: bash docs/routing-study.sh FOLDER. A table is FOLDER/<name>/table.md (stable.md
# for largest stable rates); an interrupted study goes on where it stopped. Fashion-MNIST and WordNet come from Debian's
# packages dataset-fashion-mnist and wordnet-base.
set -euo pipefail
OUT=${1:?folder for the results}
export OMP_NUM_THREADS=1

MLP="model=mlp model.inputs=784 data=fashion_mnist"
CONV="model=conv_net data=fashion_mnist data.batch_size=32"
TEXT="data=byte_text data.block_size=32 data.max_bytes=4000000 data.val_batches=64"
GPT="model=byte_gpt model.width=64 model.layers=2 data.batch_size=8 $TEXT --held-out 64 --clip 1 --warmup 0.05"
GPT1M="model=byte_gpt data.batch_size=4 $TEXT --held-out 64 --clip 1 --warmup 0.05"
LSTM="model=gloss_lstm model.embedding=32 model.hidden=32 data=wordnet data.batch_size=16 data.vocabulary=2000"
LSTM="$LSTM data.max_words=16 data.max_glosses=40000"

BASE=(none concurrency drop dc cosine floor)
OTHER=(inverse polynomial zeno ssp predict)
OLD='g2(frame="adaptive", scale="thermal", weight_rule="mge", beta=32.0, rank=4)'
CONSTANT='g2_spectral(energies="constant", constant=0.1)'
AGE='g2_spectral(energies="age")'
SHUFFLED='g2_spectral(energies="shuffled")'
UNTRACKED='g2_spectral(directions="random")'
GATES=(g2_spectral "$CONSTANT" "$AGE" "$SHUFFLED" "$OLD")
SYNC=("rounds(m=4)" "rounds(m=8)" "rounds(m=12)")
TWO="--seeds 1 2 --most-rates 5"

# Equal pushes.
g2-bench routing $MLP --optimizer adam --pushes 400 --rates 2.5e-4 5e-4 1e-3 \
  --rules "${BASE[@]}" "${OTHER[@]}" "${GATES[@]}" "$UNTRACKED" --out "$OUT/mlp-adam"
g2-bench routing $CONV --optimizer adam --pushes 400 --rates 5e-4 1e-3 2e-3 \
  --rules "${BASE[@]}" "${GATES[@]}" --out "$OUT/conv-adam"
g2-bench routing $MLP --optimizer sgd --pushes 400 --rates 0.02 0.04 0.08 \
  --rules none drop dc floor g2_spectral "$CONSTANT" --out "$OUT/mlp-sgd"
g2-bench routing $CONV --optimizer sgd --pushes 400 --rates 0.02 0.04 0.08 \
  --rules none drop dc floor g2_spectral "$CONSTANT" --out "$OUT/conv-sgd"
g2-bench routing $GPT --optimizer adam --pushes 400 --rates 5e-4 1e-3 2e-3 \
  --rules none drop dc floor g2_spectral "$CONSTANT" "$SHUFFLED" --seeds 1 2 --out "$OUT/gpt-adam"
g2-bench routing $GPT --optimizer muon --pushes 400 --rates 5e-3 1e-2 2e-2 \
  --rules none g2_spectral floor --seeds 1 2 --out "$OUT/gpt-muon"
g2-bench routing $LSTM --optimizer adam --pushes 300 --rates 2e-3 4e-3 8e-3 \
  --rules none g2_spectral "$CONSTANT" floor $TWO --out "$OUT/lstm-adam"
g2-bench routing $GPT1M --optimizer adam --pushes 300 --rates 5e-4 1e-3 2e-3 \
  --rules none g2_spectral floor --seeds 1 --most-rates 4 --out "$OUT/gpt1m-adam"

# Equal simulated time; g2_spectral is charged for its decisions, "g2_spectral()" is the same gate without a charge.
CHARGE="$TWO --overhead auto none=0 g2_spectral()=0"
g2-bench routing $MLP --optimizer adam --time-limit 32 $CHARGE --rates 5e-4 1e-3 2e-3 \
  --rules none "${SYNC[@]}" "rounds(m=16)" g2_spectral "g2_spectral()" --out "$OUT/mlp-time-straggler"
g2-bench routing $CONV --optimizer adam --time-limit 32 $CHARGE --most-rates 7 --rates 1e-3 2e-3 4e-3 \
  --rules none "${SYNC[@]}" "rounds(m=16)" g2_spectral "g2_spectral()" --out "$OUT/conv-time-straggler"
g2-bench routing $GPT --optimizer adam --time-limit 32 $CHARGE --most-rates 4 --rates 1e-3 2e-3 4e-3 \
  --rules none "rounds(m=8)" "rounds(m=12)" g2_spectral "g2_spectral()" --out "$OUT/gpt-time-straggler"
g2-bench routing $GPT --optimizer muon --time-limit 32 $TWO --rates 1e-2 2e-2 4e-2 \
  --rules "rounds(m=8)" "rounds(m=12)" "g2_spectral()" --out "$OUT/gpt-muon-time"
for task in MLP CONV; do
  g2-bench routing ${!task} --optimizer adam --time-limit 108 --delays "pareto(1.3)" $TWO --most-rates 7 \
    --rates 1e-3 2e-3 4e-3 --rules "${SYNC[@]}" "g2_spectral()" --out "$OUT/${task,,}-time-pareto"
  g2-bench routing ${!task} --optimizer adam --time-limit 54 --delays "speeds((1, 4))" $TWO --most-rates 7 \
    --rates 1e-3 2e-3 4e-3 --rules "${SYNC[@]}" "g2_spectral()" --out "$OUT/${task,,}-time-speeds"
done

# Largest stable rates, thaw at a constant rate, and the gate without staleness.
for task in MLP CONV; do
  g2-bench routing ${!task} --optimizer adam --pushes 400 --rates 1e-3 --rules none g2_spectral \
    --stable-rates --seeds 1 --out "$OUT/${task,,}-stable"
  g2-bench routing ${!task} --optimizer adam --pushes 400 --schedule constant --rates 2.5e-4 5e-4 1e-3 \
    --rules none g2_spectral "$OLD" --seeds 1 --out "$OUT/${task,,}-constant"
done
g2-bench routing $MLP --optimizer adam --pushes 400 --rates 2e-3 4e-3 8e-3 \
  --rules floor "floor(gate='g2_spectral')" --out "$OUT/mlp-fresh"
g2-bench routing $GPT --optimizer adam --pushes 400 --rates 1e-3 2e-3 4e-3 \
  --rules floor "floor(gate='g2_spectral')" $TWO --out "$OUT/gpt-fresh"

# Prepared, and not run for the page.
[ "${2:-}" = all ] || exit 0
g2-bench routing $CONV --optimizer adam --pushes 400 --rates 5e-4 1e-3 2e-3 \
  --rules "${BASE[@]}" "${OTHER[@]}" "${GATES[@]}" --out "$OUT/conv-adam"
g2-bench routing $GPT --optimizer adam --pushes 400 --rates 5e-4 1e-3 2e-3 \
  --rules "${BASE[@]}" "${OTHER[@]}" "${GATES[@]}" --out "$OUT/gpt-adam"
for task in MLP CONV; do
  g2-bench routing ${!task} --optimizer sgd --pushes 400 --rates 0.02 0.04 0.08 \
    --rules "${BASE[@]}" "${OTHER[@]}" dana "${GATES[@]}" --out "$OUT/${task,,}-sgd"
done
g2-bench routing $GPT1M --optimizer adam --pushes 300 --rates 5e-4 1e-3 2e-3 \
  --rules none g2_spectral "$CONSTANT" floor $TWO --out "$OUT/gpt1m-adam"
g2-bench routing $GPT --optimizer muon --time-limit 32 $CHARGE --most-rates 9 --rates 1e-2 2e-2 4e-2 \
  --rules none "${SYNC[@]}" g2_spectral "g2_spectral()" --out "$OUT/gpt-muon-time"
g2-bench routing $GPT --optimizer adam --time-limit 108 --delays "pareto(1.3)" $TWO --rates 1e-3 2e-3 4e-3 \
  --rules "${SYNC[@]}" "g2_spectral()" --out "$OUT/gpt-time-pareto"
g2-bench routing $GPT --optimizer adam --time-limit 54 --delays "speeds((1, 4))" $TWO --rates 1e-3 2e-3 4e-3 \
  --rules "${SYNC[@]}" "g2_spectral()" --out "$OUT/gpt-time-speeds"
