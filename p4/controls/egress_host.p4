// Filters a replicated copy by its port, and readdresses it to the host there (or to the pool
// address of the next switch). A port that is not in the frame's set, or that has no host, gets
// nothing. Runs in egress on copies of shared frames; most copies end here, so it is one lookup.

control EgressHost(inout headers_t hdr, inout local_metadata_t local_metadata, in bit<9> egress_port) {
    @name(".rewrite")
    action rewrite(bit<48> mac, bit<32> ip, bit<16> udp_port, bit<32> port_bit) {
        local_metadata.member = local_metadata.port_bits & port_bit;
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
        hdr.udp.dst_port = udp_port;
        hdr.udp.checksum = 0;   // RFC 768: none
        local_metadata.rewritten = 1;
    }

    @name(".no_host")
    action no_host() {
        local_metadata.member = 0;
    }

    @name(".egress_host")
    table egress_host {
        key = { egress_port : exact @name("egress_port"); }
        actions = { rewrite; no_host; }
        const default_action = no_host();
        size = MAX_PORTS;
    }

    apply {
        egress_host.apply();
    }
}
