// v1model: the pending table, an in-network interest table in three register arrays, indexed by a
// hash of (namespace, key, segment). An entry:
//
//   pending_fingerprint  32 bits  another hash of the same, never 0; 0 = free
//   pending_stamp        32 bits  tick at which it was taken or last refreshed
//   pending_ports        32 bits  one bit a port that waits for the answer
//
// Fingerprint and stamp are one word of a dual stateful ALU on Tofino, so they are read and written
// together, before the ports; a lease that has run out is noticed by the next READ. Each packet
// touches each array once. An entry with a fingerprint and no ports cannot be: taking an entry sets
// a bit, and clearing it clears all three.

control PendingIndex(in headers_t hdr, inout meta_t meta) {
    apply {
        hash(meta.pending_index, HashAlgorithm.crc16, 16w0,
             { hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment }, 32w65536);
        hash(meta.fingerprint, HashAlgorithm.crc32, 32w0,
             { hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment }, 64w0x100000000);
        meta.fingerprint = meta.fingerprint | 1;
    }
}

control Pending(in headers_t hdr, inout meta_t meta) {
    register<bit<32>>(PENDING_ENTRIES) pending_fingerprint;
    register<bit<32>>(PENDING_ENTRIES) pending_stamp;
    register<bit<32>>(PENDING_ENTRIES) pending_ports;
    bit<32> index = 0;
    bit<32> old_fingerprint = 0;
    bit<32> stamp = 0;
    bit<32> ports = 0;

    apply {
        index = (bit<32>)meta.pending_index;
        @atomic {
            pending_fingerprint.read(old_fingerprint, index);
            pending_stamp.read(stamp, index);
            pending_ports.read(ports, index);
            if (hdr.kvcast.op == OP_READ) {
                if (old_fingerprint == 0) {
                    meta.pending = PENDING_FREE;
                } else if (meta.now - stamp > meta.lease_ticks) {
                    meta.pending = PENDING_EXPIRED;
                } else if (old_fingerprint == meta.fingerprint) {
                    meta.pending = PENDING_SAME;
                } else {
                    meta.pending = PENDING_OTHER;
                }
                if (meta.pending == PENDING_SAME) {
                    meta.waiting = ports;
                    meta.own = ports & meta.port_bit;
                    if (hdr.kvcast.flags & FLAG_RETRY != 0) {
                        pending_stamp.write(index, meta.now);
                    }
                    pending_ports.write(index, ports | meta.reader_bits);
                } else if (meta.pending != PENDING_OTHER) {
                    pending_fingerprint.write(index, meta.fingerprint);
                    pending_stamp.write(index, meta.now);
                    pending_ports.write(index, meta.reader_bits);
                }
            } else if (old_fingerprint == meta.fingerprint) {
                meta.waiting = ports;
                if (meta.clear == 1) {
                    pending_fingerprint.write(index, 0);
                    pending_ports.write(index, 0);
                }
            }
        }
    }
}
