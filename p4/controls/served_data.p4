// Makes the DATA that answers a READ out of the READ itself, once a chunk is attached to it: sender
// and receiver swap, lengths and flags become those of DATA. Runs in egress on a copy that goes
// out, not on the one that goes round again.

control ServedData(inout headers_t hdr, inout local_metadata_t local_metadata) {
    bit<48> mac = 0;
    bit<32> ip = 0;
    bit<16> udp_port = 0;

    // The TTL starts anew, as from a host.
    action become_data() {
        mac = hdr.ethernet.dst;
        hdr.ethernet.dst = hdr.ethernet.src;
        hdr.ethernet.src = mac;
        ip = hdr.ipv4.dst;
        hdr.ipv4.dst = hdr.ipv4.src;
        hdr.ipv4.src = ip;
        hdr.ipv4.ttl = 64;
        hdr.ipv4.total_length = IPV4_BYTES + UDP_BYTES + KVCAST_BYTES + CHUNK_BYTES;
        udp_port = hdr.udp.dst_port;
        hdr.udp.dst_port = hdr.udp.src_port;
        hdr.udp.src_port = udp_port;
        hdr.udp.checksum = 0;   // RFC 768: none
        local_metadata.rewritten = 1;
        hdr.udp.length = UDP_BYTES + KVCAST_BYTES + CHUNK_BYTES;
        hdr.kvcast.op = OP_DATA;
        // Only PARTIAL stays, and RESIDENT comes: by slices, since a stage does one operation.
        hdr.kvcast.flags[15:2] = FLAG_RESIDENT[15:2];
        hdr.kvcast.flags[0:0] = 0;
        hdr.kvcast.gather = 0;
        hdr.kvcast.wanted = 0;
    }

    apply {
        become_data();
        if (local_metadata.last == 1) {
            hdr.kvcast.flags = hdr.kvcast.flags | FLAG_LAST;
        }
    }
}
