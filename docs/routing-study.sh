#!/usr/bin/env bash
# Every table of docs/routing-study.md, most important first: bash docs/routing-study.sh FOLDER. An interrupted study
# goes on where it stopped; a table's file is FOLDER/<name>/table.md.
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

g2-bench routing $MLP --optimizer adam --pushes 400 --rates 2.5e-4 5e-4 1e-3 --rules "${BASE[@]}" "${OTHER[@]}" --out $OUT/mlp-adam
g2-bench routing $CONV --optimizer adam --pushes 400 --rates 5e-4 1e-3 2e-3 --rules "${BASE[@]}" "${OTHER[@]}" --out $OUT/conv-adam
g2-bench routing $MLP --optimizer sgd --pushes 400 --rates 0.01 0.02 0.04 --rules "${BASE[@]}" "${OTHER[@]}" dana --out $OUT/mlp-sgd
g2-bench routing $GPT --optimizer adam --pushes 400 --rates 5e-4 1e-3 2e-3 --rules "${BASE[@]}" --out $OUT/gpt-adam
g2-bench routing $CONV --optimizer sgd --pushes 400 --rates 0.02 0.04 0.08 --rules "${BASE[@]}" "${OTHER[@]}" dana --out $OUT/conv-sgd
g2-bench routing $GPT --optimizer muon --pushes 400 --rates 5e-3 1e-2 2e-2 --rules none floor --seeds 1 2 --out $OUT/gpt-muon
g2-bench routing $LSTM --optimizer adam --pushes 300 --rates 1e-3 2e-3 4e-3 --rules none floor --seeds 1 2 --out $OUT/lstm-adam
g2-bench routing $GPT1M --optimizer adam --pushes 300 --rates 5e-4 1e-3 2e-3 --rules none floor --seeds 1 2 --out $OUT/gpt1m-adam
