// Readdresses a copy of an RDMA WRITE to the reader at its port: from the pool's address and to that
// reader's, its queue pair and its key to its landing zone. What is xored into IP identification and UDP
// source port leaves the packet's check (ICRC) as it is; the controller works it out for each home and
// reader. A port that is not in the packet's set, or whose host has no zone, or a packet of a host
// that is no home, ends here. Runs in egress.

control WriteCopy(inout headers_t hdr, inout local_metadata_t local_metadata,
                  in bit<9> ingress_port, in bit<9> egress_port) {
    @name(".readdress")
    action readdress(bit<48> mac, bit<32> src, bit<32> dst, bit<24> queue_pair, bit<32> write_key,
                     bit<16> identification, bit<16> src_port, bit<32> port_bit) {
        local_metadata.member = local_metadata.port_bits & port_bit;
        hdr.ethernet.dst = mac;
        hdr.ipv4.src = src;
        hdr.ipv4.dst = dst;
        hdr.ipv4.identification = hdr.ipv4.identification ^ identification;
        hdr.udp.src_port = hdr.udp.src_port ^ src_port;
        hdr.udp.checksum = 0;   // RFC 768: none
        hdr.bth.queue_pair = queue_pair;
        hdr.write.key = write_key;
        local_metadata.rewritten = 1;
    }

    @name(".no_zone")
    action no_zone() {
        local_metadata.member = 0;
    }

    @name(".landing_zone")
    table landing_zone {
        key = {
            ingress_port : exact @name("home_port");
            egress_port  : exact @name("reader_port");
        }
        actions = { readdress; no_zone; }
        const default_action = no_zone();
        size = LANDING_ZONES;
    }

    apply {
        landing_zone.apply();
    }
}
