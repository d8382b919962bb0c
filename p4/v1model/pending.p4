// The pending interest table on v1model: three arrays of 32-bit words, each read once and written
// once a packet, around the rules of coalescing.p4. BMv2 runs one ingress thread, so an entry is
// never seen half written; @atomic says so to other targets.
//
// The hash (block_hash.p4) that indexes the table also gives the fingerprint's lower half: 31 bits of
// identity within a namespace, and the namespace itself whole. A shared answer by RDMA has no key in
// its packets: there the READ's tag says index and slot, and each packet says them again. A key can be made to collide with
// another on purpose (CRC is linear), but only within a namespace that its sender may read.

#include "coalescing.p4"

control Pending(inout headers_t hdr, inout local_metadata_t local_metadata) {
    register<bit<32>>(PENDING_ENTRIES) pending_fingerprint;
    register<bit<32>>(PENDING_ENTRIES) pending_stamp;   // ticks of 64 us, modulo 2^32 (76 hours)
    register<bit<32>>(PENDING_ENTRIES) pending_ports;   // bit p-1: port p
    Coalescing() coalescing;
    bit<32> index = 0;
    bit<32> interest = 0;

    apply {
        if (hdr.write.isValid()) {
            index = (bit<32>)(hdr.write.immediate_low ^ hdr.write.address_low);
            local_metadata.fingerprint = (hdr.write.immediate_high ^ hdr.write.address_mid)
                ++ 8w0x80 ++ hdr.write.address_mid[8:2] ++ 1w1;
        } else if (hdr.kvcast.flags & FLAG_WRITE != 0) {
            index = (bit<32>)hdr.kvcast.tag[15:0];
            local_metadata.fingerprint =
                hdr.kvcast.namespace ++ 8w0x80 ++ hdr.kvcast.tag[24:18] ++ 1w1;
        } else {
            index = (bit<32>)local_metadata.hash[15:0];
            local_metadata.fingerprint = hdr.kvcast.namespace ++ (local_metadata.hash[31:16] | 1);
        }
        if (local_metadata.is_answer == 1) {
            interest = ~local_metadata.out_bit;
        } else {
            interest = local_metadata.reader_bit;
        }
        @atomic {
            pending_fingerprint.read(local_metadata.entry.fingerprint, index);
            pending_stamp.read(local_metadata.entry.stamp, index);
            pending_ports.read(local_metadata.entry.ports, index);
            local_metadata.free = (bit<1>)(local_metadata.entry.fingerprint == 0);
            local_metadata.mine =
                (bit<1>)(local_metadata.entry.fingerprint == local_metadata.fingerprint);
            local_metadata.stale = (bit<1>)(
                local_metadata.now - local_metadata.entry.stamp > local_metadata.lease_ticks);
            local_metadata.others = local_metadata.entry.ports & interest;
            coalescing.apply(hdr, local_metadata);
            pending_fingerprint.write(index, local_metadata.entry.fingerprint);
            pending_stamp.write(index, local_metadata.entry.stamp);
            pending_ports.write(index, local_metadata.entry.ports);
        }
    }
}
