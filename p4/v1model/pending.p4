// The pending interest table on v1model: sets of two entries, in three arrays of 32-bit words, around the
// rules of coalescing.p4. BMv2 runs one ingress thread, so an entry is never seen half written; @atomic
// says so to other targets.
//
// A READ takes the second entry of its set only where the first is another segment's in flight: two
// segments in flight that meet in a set coalesce each for itself, and a third is forwarded plain. When
// the first is free again while the second is in use, the next READ of that segment opens the first too;
// so an answer looks at both, and goes to all who wait in either. (A pipeline of hardware cannot look at
// the second entry before it changes the first; hence these rules, which tna/pending.p4 has too.)
//
// The hash (block_hash.p4) that finds the set also gives the fingerprint's lower half: 30 bits of
// identity within a namespace, and the namespace itself whole. A shared answer by RDMA has no key in
// its packets: there the READ's tag says index and slot, and each packet says them again. A key can be
// made to collide with another on purpose (CRC is linear), but only within a namespace that its sender
// may read.

#include "coalescing.p4"

control Pending(inout headers_t hdr, inout local_metadata_t local_metadata) {
    register<bit<32>>(2 * PENDING_SETS) pending_fingerprint;  // a set's second entry: index + PENDING_SETS
    register<bit<32>>(2 * PENDING_SETS) pending_stamp;   // ticks of 64 us, modulo 2^32 (76 hours)
    register<bit<32>>(2 * PENDING_SETS) pending_ports;   // bit p-1: port p
    Coalescing() coalescing;
    bit<16> hashed = 0;
    bit<32> index = 0;
    bit<32> second_index = 0;
    bit<32> second_fingerprint = 0;
    bit<32> second_ports = 0;
    bit<1> both = 0;

    action look() {
        pending_fingerprint.read(local_metadata.entry.fingerprint, index);
        pending_stamp.read(local_metadata.entry.stamp, index);
        pending_ports.read(local_metadata.entry.ports, index);
        local_metadata.free = (bit<1>)(local_metadata.entry.fingerprint == 0);
        local_metadata.mine =
            (bit<1>)(local_metadata.entry.fingerprint == local_metadata.fingerprint);
        local_metadata.stale = (bit<1>)(
            local_metadata.now - local_metadata.entry.stamp > local_metadata.lease_ticks);
    }

    apply {
        if (hdr.write.isValid()) {
            hashed = hdr.write.immediate_low ^ hdr.write.address_low;
            local_metadata.fingerprint = (hdr.write.immediate_high ^ hdr.write.address_mid)
                ++ 7w0x40 ++ hdr.write.address_mid[8:2] ++ hashed[15:15] ++ 1w1;
        } else if (hdr.kvcast.flags & FLAG_WRITE != 0) {
            hashed = hdr.kvcast.tag[15:0];
            local_metadata.fingerprint =
                hdr.kvcast.namespace ++ 7w0x40 ++ hdr.kvcast.tag[24:18] ++ hashed[15:15] ++ 1w1;
        } else {
            hashed = local_metadata.hash[15:0];
            local_metadata.fingerprint =
                hdr.kvcast.namespace ++ local_metadata.hash[31:18] ++ hashed[15:15] ++ 1w1;
        }
        index = (bit<32>)hashed[14:0];
        second_index = index + PENDING_SETS;
        @atomic {
            look();
            if (local_metadata.is_answer == 0) {
                if (local_metadata.free == 0 && local_metadata.mine == 0 && local_metadata.stale == 0) {
                    index = second_index;
                    look();
                }
            } else {
                pending_fingerprint.read(second_fingerprint, second_index);
                if (second_fingerprint == local_metadata.fingerprint) {
                    pending_ports.read(second_ports, second_index);
                    if (local_metadata.mine == 1) {
                        both = 1;
                        local_metadata.entry.ports = local_metadata.entry.ports | second_ports;
                    } else {
                        index = second_index;
                        look();
                    }
                }
                local_metadata.others = local_metadata.entry.ports & ~local_metadata.out_bit;
            }
            coalescing.apply(hdr, local_metadata);
            pending_fingerprint.write(index, local_metadata.entry.fingerprint);
            pending_stamp.write(index, local_metadata.entry.stamp);
            pending_ports.write(index, local_metadata.entry.ports);
            if (both == 1) {
                pending_fingerprint.write(second_index, local_metadata.entry.fingerprint);
                pending_stamp.write(second_index, local_metadata.entry.stamp);
                pending_ports.write(second_index, local_metadata.entry.ports);
            }
        }
    }
}
