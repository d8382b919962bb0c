#!/usr/bin/env bash
# Three inference nodes, one block. A walk through a pool, on one machine, without root.
#
#   examples/three-nodes/walk.sh
#
# Node 1 stores a block; nodes 2 and 3 read it at the same moment; then the switch's own counters
# say how the second read travelled. Every part that is started here is stopped at the end.
set -euo pipefail

# The command, and the first of the ports of this machine that are used (12 in a row).
KVCAST=${KVCAST:-kvcast}
BASE=${KVCAST_BASE_PORT:-24100}
GRPC=$BASE AGENTS=$((BASE + 1)) HTTP=$((BASE + 2))

FOLDER=$(mktemp -d)
PARTS=()
finish() {
    # Agents first: they take their leave of the controller.
    for ((at = ${#PARTS[@]} - 1; at >= 0; at--)); do
        kill "${PARTS[at]}" 2>/dev/null || true
        wait "${PARTS[at]}" 2>/dev/null || true
    done
    rm -rf "$FOLDER"
}
trap finish EXIT

# Every daemon prints a line of JSON when it is ready. Start one, and wait for that line.
start() {
    local name=$1
    shift
    : >"$FOLDER/$name.out"
    "$KVCAST" "$@" >"$FOLDER/$name.out" 2>"$FOLDER/$name.log" &
    PARTS+=($!)
    for _ in $(seq 300); do
        if grep -q '"ready"' "$FOLDER/$name.out"; then return; fi
        if ! kill -0 $! 2>/dev/null; then break; fi
        sleep 0.1
    done
    echo "$name did not start:" >&2
    cat "$FOLDER/$name.log" >&2
    exit 1
}

echo "1. A switch with three ports. Each port is a UDP tunnel: one datagram is one Ethernet frame."
ports=()
for node in 1 2 3; do
    ports+=(--port "$node=udp:127.0.0.1:$((BASE + 2 + node)):127.0.0.1:$((BASE + 5 + node))")
done
start switch switch --grpc-addr "127.0.0.1:$GRPC" "${ports[@]}"

echo "2. A controller: it loads the P4 program, and knows who is in the pool."
start controller controller --switch "127.0.0.1:$GRPC" --state "$FOLDER/controller.sqlite" \
    --agents-addr "127.0.0.1:$AGENTS" --http-addr "127.0.0.1:$HTTP"

echo "3. An agent on each node. Engines speak to it through a Unix socket."
for node in 1 2 3; do
    start "node-$node" agent --node-id "node-$node" --controller "127.0.0.1:$AGENTS" \
        --tunnel "127.0.0.1:$((BASE + 5 + node)):127.0.0.1:$((BASE + 2 + node))" \
        --ip "10.77.0.$node" --mac "02:6b:76:00:00:0$node" --switch-port "$node" \
        --arena-bytes 32M --socket "$FOLDER/node-$node.sock"
done

echo "4. Node 1 stores a block of 200,000 bytes: what an engine does with a prefix's KV."
head -c 200000 /dev/urandom >"$FOLDER/block"
# The agents may still be hearing of each other; a put waits for nobody, so try again.
for _ in $(seq 50); do
    if KEY=$("$KVCAST" put --socket "$FOLDER/node-1.sock" "$FOLDER/block" 2>"$FOLDER/put.log"); then
        break
    fi
    sleep 0.2
done
echo "   its key: ${KEY:?$(cat "$FOLDER/put.log")}"

echo "5. Nodes 2 and 3 read it at once, and so does node 1."
readers=()
for node in 1 2 3; do
    "$KVCAST" get --socket "$FOLDER/node-$node.sock" "$KEY" -o "$FOLDER/copy-$node" &
    readers+=($!)
done
for reader in "${readers[@]}"; do wait "$reader"; done
for node in 1 2 3; do
    cmp "$FOLDER/block" "$FOLDER/copy-$node"
    echo "   node $node: the same bytes"
done

echo "6. And again on node 2: now it is in its own memory (tier \"local\")."
"$KVCAST" get --socket "$FOLDER/node-2.sock" "$KEY" --json

echo "7. The pool as the controller sees it (without --once it goes on)."
sleep 2 # agents and switch are asked once a second, or so
"$KVCAST" status --http "http://127.0.0.1:$HTTP" --once

echo "done"
