// A plain router: what most programs for a software switch look like. It routes IPv4 by longest
// prefix, rewrites the MAC addresses, decrements TTL and mends the checksum; everything else is
// switched by destination MAC. The bench compares switches on it (kvcast.bench.switch).
//
// Compiled by `python -m kvcast.bench.l3`; the tests keep the artefacts beside it current.

#include <core.p4>
#include <v1model.p4>

const bit<16> ETHERTYPE_IPV4 = 0x0800;

header ethernet_h {
    bit<48> dst;
    bit<48> src;
    bit<16> ethertype;
}

header ipv4_h {
    bit<4>  version;
    bit<4>  ihl;
    bit<8>  tos;
    bit<16> total_length;
    bit<16> identification;
    bit<3>  flags;
    bit<13> fragment_offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}

struct headers_t {
    ethernet_h ethernet;
    ipv4_h     ipv4;
}

struct local_metadata_t { }

parser L3Parser(packet_in packet, out headers_t hdr, inout local_metadata_t local_metadata,
                inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ethertype) {
            ETHERTYPE_IPV4: parse_ipv4;
            default: accept;
        }
    }
    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition accept;
    }
}

control L3Verify(inout headers_t hdr, inout local_metadata_t local_metadata) {
    apply {
        verify_checksum(hdr.ipv4.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment_offset, hdr.ipv4.ttl,
              hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control L3Ingress(inout headers_t hdr, inout local_metadata_t local_metadata,
                  inout standard_metadata_t standard) {
    action drop() {
        mark_to_drop(standard);
    }

    action to_nexthop(bit<9> port, bit<48> dst_mac, bit<48> src_mac) {
        standard.egress_spec = port;
        hdr.ethernet.dst = dst_mac;
        hdr.ethernet.src = src_mac;
        hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
    }

    action to_port(bit<9> port) {
        standard.egress_spec = port;
    }

    table ipv4_route {
        key = { hdr.ipv4.dst: lpm; }
        actions = { to_nexthop; drop; }
        default_action = drop();
        size = 16384;
    }

    table l2_forward {
        key = { hdr.ethernet.dst: exact; }
        actions = { to_port; drop; }
        default_action = drop();
        size = 16384;
    }

    apply {
        if (standard.checksum_error == 1) {
            drop();
        } else if (hdr.ipv4.isValid() && hdr.ipv4.ttl > 1) {
            ipv4_route.apply();
        } else {
            l2_forward.apply();
        }
    }
}

control L3Egress(inout headers_t hdr, inout local_metadata_t local_metadata,
                 inout standard_metadata_t standard) {
    apply { }
}

control L3Compute(inout headers_t hdr, inout local_metadata_t local_metadata) {
    apply {
        update_checksum(hdr.ipv4.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.total_length,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment_offset, hdr.ipv4.ttl,
              hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control L3Deparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
    }
}

V1Switch(L3Parser(), L3Verify(), L3Ingress(), L3Egress(), L3Compute(), L3Deparser()) main;
