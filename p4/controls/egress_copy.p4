// Decides which copies of a replicated packet leave, and to whom they are addressed: a port whose
// bit is not in the set gets none; the others are rewritten for the host, or for the next switch's
// pool address, at that port.

control EgressCopy(inout headers_t hdr, inout meta_t meta, in bit<9> egress_port) {
    action rewrite(bit<48> mac, bit<32> ip, bit<16> udp_port, bit<32> port_bit) {
        meta.copy_bits = meta.copy_bits & port_bit;
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
        hdr.udp.dst_port = udp_port;
    }
    action no_host() { meta.copy_bits = 0; }
    table egress_host {
        key = { egress_port : exact; }
        actions = { rewrite; no_host; }
        const default_action = no_host();
        size = 512;
    }
    apply { egress_host.apply(); }
}

// Makes DATA of a served READ: the home's address answers, as if the home had.
control ServedData(inout headers_t hdr, inout meta_t meta) {
    apply {
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.udp.src_port = hdr.udp.dst_port;
        hdr.ipv4.ttl = 64;
        hdr.ipv4.total_length = IPV4_BYTES + UDP_BYTES + KVCAST_BYTES + CHUNK_BYTES;
        hdr.udp.length = UDP_BYTES + KVCAST_BYTES + CHUNK_BYTES;
        hdr.kvcast.op = OP_DATA;
        hdr.kvcast.flags = FLAG_RESIDENT;
        hdr.kvcast.size = meta.resident_size;
        hdr.kvcast.gather = 0;
        hdr.kvcast.wanted = 0;
        hdr.padding.setInvalid();
    }
}
