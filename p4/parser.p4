// The parse graph and its inverse, for any target.
//
// A kvcast datagram is IPv4 without options, UDP, destination port KVCAST_UDP_PORT. Two disguises
// under which a host's kernel would still deliver a datagram to that port are parser errors, and
// so are dropped where the switch guards: a VLAN tag (hosts take priority-tagged frames as
// untagged; host ports are access ports), and UDP behind IPv4 options. A first fragment is parsed
// like any datagram, and told apart by FrameClass.

#ifndef KVCAST_PARSER_P4_
#define KVCAST_PARSER_P4_

#include "types.p4"

const bit<16> ETHERTYPE_VLAN        = 0x8100; // IEEE 802.1Q
const bit<16> ETHERTYPE_SERVICE_TAG = 0x88A8; // IEEE 802.1ad
const bit<16> ETHERTYPE_OLD_QINQ    = 0x9100;
const bit<4>  IPV4_WORDS            = 5;      // header length without options, RFC 791

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
            default: accept;
        }
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
        packet.emit(hdr.cell);
        packet.emit(hdr.padding);
    }
}

#endif
