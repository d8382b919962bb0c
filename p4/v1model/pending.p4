// The in-network interest table on v1model: three arrays of 32-bit words, each read once and
// written once a packet, around the rules of controls/coalescing.p4. On a Tofino fingerprint and
// stamp are one dual ALU and the ports another in the next stage. BMv2 runs one ingress thread, so
// an entry is never seen half written; @atomic says so to other targets.
//
// The hash (block_hash.p4) that indexes the table also gives the fingerprint's lower half: 31 bits of identity
// within a namespace, and the namespace itself whole. A key can be made to collide with another on
// purpose (CRC is linear), but only within a namespace that its sender may read.

#include "../controls/coalescing.p4"

control Pending(inout headers_t hdr, inout state_t state) {
    register<bit<32>>(PENDING_ENTRIES) pending_fingerprint;
    register<bit<32>>(PENDING_ENTRIES) pending_stamp;   // ticks of 64 us, modulo 2^32 (76 hours)
    register<bit<32>>(PENDING_ENTRIES) pending_ports;   // bit p-1: port p
    Coalescing() coalescing;
    bit<32> index = 0;
    bit<32> interest = 0;

    apply {
        index = (bit<32>)state.hash[15:0];
        state.fingerprint = hdr.kvcast.namespace ++ (state.hash[31:16] | 1);
        if (state.is_answer == 1) {
            interest = ~state.out_bit;
        } else {
            interest = state.reader_bit;
        }
        @atomic {
            pending_fingerprint.read(state.entry.fingerprint, index);
            pending_stamp.read(state.entry.stamp, index);
            pending_ports.read(state.entry.ports, index);
            state.free = (bit<1>)(state.entry.fingerprint == 0);
            state.mine = (bit<1>)(state.entry.fingerprint == state.fingerprint);
            state.stale = (bit<1>)(state.now - state.entry.stamp > state.lease_ticks);
            state.others = state.entry.ports & interest;
            coalescing.apply(hdr, state);
            pending_fingerprint.write(index, state.entry.fingerprint);
            pending_stamp.write(index, state.entry.stamp);
            pending_ports.write(index, state.entry.ports);
        }
    }
}
