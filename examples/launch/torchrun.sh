#!/usr/bin/env bash
# torchrun on one host, or on each of several at the same time:
#
#   bash torchrun.sh                                          # one host, two ranks
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash torchrun.sh # on the first of two hosts, whose address this is
#   NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash torchrun.sh # on the second
#
# On one host torchrun's own store still listens on all interfaces (SECURITY.md); ranks and servers listen on loopback.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nodes=${NODES:-1} ranks=${RANKS:-2}
if [ "$nodes" = 1 ]; then
  where=(--standalone)
else
  where=(--nnodes="$nodes" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
exec python -m torch.distributed.run "${where[@]}" --nproc-per-node="$ranks" "$here/train.py" --nodes "$nodes" --devices "$ranks" "$@"
