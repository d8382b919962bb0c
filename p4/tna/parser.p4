// The parse graph (parse_graph.p4) and its inverse on TNA. A frame that the parser finds too short
// is dropped by the hardware, before any counter of ours. A chunk stays behind the headers, in the
// packet buffer; only a frame that stores one comes with a row of it in its headers.

#ifndef KVCAST_PARSER_P4_
#define KVCAST_PARSER_P4_

#include "../types.p4"
#include "../parse_graph.p4"
#include "headers.p4"

parser KvcastIngressParser(packet_in packet, out headers_t hdr, out local_metadata_t local_metadata,
                           out ingress_intrinsic_metadata_t intrinsic) {
    Checksum() ipv4_checksum;

    state start {
        packet.extract(intrinsic);
        packet.advance(PORT_METADATA_SIZE);
        local_metadata.broken = 0;
        local_metadata.damaged = 0;
        local_metadata.passing = 0;
        transition select(intrinsic.ingress_port[6:0]) {
            RECIRCULATION_PORT: parse_round;
            default: from_outside;
        }
    }

    state from_outside {
        hdr.round.setValid();
        hdr.round.task = TASK_NONE;
        hdr.round.again = TASK_NONE;
        hdr.round.delivery = DELIVER_NOWHERE;
        hdr.round.row = 0;
        hdr.round.index = 0;
        hdr.round.bank = 0;
        hdr.round.rewritten = 0;
        hdr.round.last = 0;
        hdr.round.serve_group = 0;
        hdr.round.port_bits = 0;
        hdr.round.generation = 0;
        transition parse_ethernet;
    }

    state parse_round {
        packet.extract(hdr.round);
        local_metadata.row_index = hdr.round.index;
        local_metadata.row_bank = hdr.round.bank;
        transition select(hdr.round.task, hdr.round.row) {
            (TASK_STORE, LAST_ROW): parse_last_row;
            (TASK_STORE, _): parse_row;
            (TASK_GATHER, _): parse_gathering;
            default: parse_round_read;
        }
    }

    // Four states with the same extractions, where one would do: p4c copies a state to which two
    // others lead, and its copy extracts twelve bytes too early, before the round header has ended.
    state parse_gathering {
        local_metadata.passing = 1;
        local_metadata.serve_group = hdr.round.serve_group;
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.kvcast);
        transition accept;
    }

    state parse_round_read {
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.kvcast);
        transition accept;
    }

    state parse_row {
        local_metadata.passing = 1;
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.kvcast);
        packet.extract(hdr.row_head);
        packet.extract(hdr.row_tail);
        transition accept;
    }

    state parse_last_row {
        local_metadata.passing = 1;
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.kvcast);
        packet.extract(hdr.row_head);
        transition accept;
    }

    state parse_ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4: parse_ipv4;
            ETHERTYPE_VLAN: broken_frame;
            ETHERTYPE_SERVICE_TAG: broken_frame;
            ETHERTYPE_OLD_QINQ: broken_frame;
            default: accept;
        }
    }

    state broken_frame {
        local_metadata.broken = 1;
        transition accept;
    }

    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        ipv4_checksum.add(hdr.ipv4);
        transition select(hdr.ipv4.ihl, hdr.ipv4.fragment_offset, hdr.ipv4.protocol) {
            (IPV4_WORDS, 0, IP_PROTOCOL_UDP): parse_udp;
            (IPV4_WORDS, _, _): parse_other;
            (_, _, IP_PROTOCOL_UDP): broken_frame;
            default: accept;
        }
    }

    state parse_other {
        local_metadata.damaged = (bit<1>)ipv4_checksum.verify();
        transition accept;
    }

    state parse_udp {
        local_metadata.damaged = (bit<1>)ipv4_checksum.verify();
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port) {
            KVCAST_UDP_PORT: parse_kvcast;
            ROCE_UDP_PORT: parse_bth;
            default: accept;
        }
    }

    state parse_bth {
        packet.extract(hdr.bth);
        transition select(hdr.bth.opcode) {
            UC_WRITE_ONLY_WITH_IMMEDIATE: parse_write;
            default: accept;
        }
    }

    state parse_write {
        packet.extract(hdr.write);
        local_metadata.place = hdr.write.address_mid;
        transition accept;
    }

    state parse_kvcast {
        packet.extract(hdr.kvcast);
        local_metadata.entry_namespace = hdr.kvcast.namespace;
        local_metadata.place = hdr.kvcast.tag[31:16];
        transition accept;
    }
}

control KvcastIngressDeparser(packet_out packet, inout headers_t hdr, in local_metadata_t local_metadata,
                              in ingress_intrinsic_metadata_for_deparser_t deparser) {
    @name(".heat_t")
    Digest<heat_t>() heat;

    apply {
        if (deparser.digest_type == HEAT_DIGEST) {
            heat.pack({ hdr.kvcast.namespace, hdr.kvcast.segment, hdr.kvcast.key,
                        local_metadata.heat_ports, local_metadata.reader_bit,
                        local_metadata.heat_count });
        }
        packet.emit(hdr);
    }
}

parser KvcastEgressParser(packet_in packet, out headers_t hdr, out local_metadata_t local_metadata,
                          out egress_intrinsic_metadata_t intrinsic) {
    state start {
        packet.extract(intrinsic);
        packet.extract(hdr.round);
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4: parse_ipv4;
            default: accept;
        }
    }

    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.ihl, hdr.ipv4.fragment_offset, hdr.ipv4.protocol) {
            (IPV4_WORDS, 0, IP_PROTOCOL_UDP): parse_udp;
            default: accept;
        }
    }

    state parse_udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port) {
            KVCAST_UDP_PORT: parse_kvcast;
            ROCE_UDP_PORT: parse_bth;
            default: accept;
        }
    }

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
        transition accept;
    }
}

// The IPv4 header checksum is made anew only where a header was rewritten: a damaged one must not
// leave the switch whole.
control KvcastEgressDeparser(packet_out packet, inout headers_t hdr, in local_metadata_t local_metadata,
                             in egress_intrinsic_metadata_for_deparser_t deparser) {
    Checksum() ipv4_checksum;

    apply {
        if (local_metadata.rewritten == 1) {
            hdr.ipv4.checksum = ipv4_checksum.update({
                hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn,
                hdr.ipv4.total_length, hdr.ipv4.identification, hdr.ipv4.flags,
                hdr.ipv4.fragment_offset, hdr.ipv4.ttl, hdr.ipv4.protocol,
                hdr.ipv4.src, hdr.ipv4.dst });
        }
        packet.emit(hdr);
    }
}

#endif
