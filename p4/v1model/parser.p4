// The parse graph (parse_graph.p4) and its inverse on v1model, where a broken frame is a parser error.

#ifndef KVCAST_PARSER_P4_
#define KVCAST_PARSER_P4_

#include "../types.p4"
#include "../parse_graph.p4"
#include "headers.p4"

error { TaggedFrame, OptionsBeforeUdp }

parser FrameParser(packet_in packet, out headers_t hdr) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4: parse_ipv4;
            ETHERTYPE_VLAN: tagged_frame;
            ETHERTYPE_SERVICE_TAG: tagged_frame;
            ETHERTYPE_OLD_QINQ: tagged_frame;
            default: accept;
        }
    }

    state tagged_frame {
        verify(false, error.TaggedFrame);
        transition accept;
    }

    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.ihl, hdr.ipv4.fragment_offset, hdr.ipv4.protocol) {
            (IPV4_WORDS, 0, IP_PROTOCOL_UDP): parse_udp;
            (IPV4_WORDS, _, _): accept;
            (_, _, IP_PROTOCOL_UDP): options_before_udp;
            default: accept;
        }
    }

    state options_before_udp {
        verify(false, error.OptionsBeforeUdp);
        transition accept;
    }

    state parse_udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port) {
            KVCAST_UDP_PORT: parse_kvcast;
            ROCE_UDP_PORT: parse_bth;
            default: accept;
        }
    }

    // RDMA's packet is in the UDP datagram whole, or none at all.
    state parse_bth {
        packet.extract(hdr.bth);
        transition select(hdr.bth.opcode) {
            UC_WRITE_ONLY_WITH_IMMEDIATE: parse_write;
            default: accept;
        }
    }

    state parse_write {
        packet.extract(hdr.write);
        transition accept;
    }

    state parse_kvcast {
        packet.extract(hdr.kvcast);
        transition select(hdr.kvcast.op, hdr.kvcast.flags) {
            (OP_DATA, _): parse_cell;
            (OP_READ, FLAG_PADDED &&& FLAG_PADDED): parse_padding;
            default: accept;
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

control FrameDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.kvcast);
        packet.emit(hdr.bth);
        packet.emit(hdr.write);
        packet.emit(hdr.cell);
        packet.emit(hdr.padding);
    }
}

#endif
