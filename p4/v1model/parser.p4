// v1model: what is parsed. Ethernet, IPv4 without options, UDP to kvcast's port; anything else is
// ordinary traffic, and its bytes are payload. A frame that ends early sets parser_error.

parser KvcastParser(packet_in packet, out headers_t hdr, inout meta_t meta,
                     inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4 : parse_ipv4;
            default : accept;
        }
    }
    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.flags[0:0],
                          hdr.ipv4.fragment_offset, hdr.ipv4.protocol) {
            (4, 5, 0, 0, IP_PROTOCOL_UDP) : parse_udp;
            default : accept;
        }
    }
    state parse_udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port) {
            KVCAST_UDP_PORT : parse_kvcast;
            default : accept;
        }
    }
    state parse_kvcast {
        packet.extract(hdr.kvcast);
        transition select(hdr.kvcast.op, hdr.kvcast.flags) {
            (OP_DATA, _) : parse_cell;
            (OP_READ, FLAG_PADDED &&& FLAG_PADDED) : parse_padding;
            default : accept;
        }
    }
    state parse_cell {
        packet.extract(hdr.cell);
        transition accept;
    }
    state parse_padding {
        packet.extract(hdr.padding);
        transition accept;
    }
}

control VerifyChecksums(inout headers_t hdr, inout meta_t meta) {
    apply { }
}

control UpdateChecksums(inout headers_t hdr, inout meta_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid() && meta.rewritten == 1,
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment_offset, hdr.ipv4.ttl,
              hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control KvcastDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.kvcast);
        packet.emit(hdr.padding);
        packet.emit(hdr.cell);
    }
}
