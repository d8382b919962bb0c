// Tables: exact, lpm, ternary, range and optional keys, direct and indirect counters,
// const entries, an action run by a hit/miss branch, checksum verification and update.
#include <core.p4>
#include <v1model.p4>

header ethernet_h { bit<48> dst; bit<48> src; bit<16> type; }
header ipv4_h {
    bit<4> version; bit<4> ihl; bit<8> tos; bit<16> length;
    bit<16> id; bit<3> flags; bit<13> fragment; bit<8> ttl; bit<8> protocol; bit<16> checksum;
    bit<32> src; bit<32> dst;
}
header l4_h { bit<16> src; bit<16> dst; }
struct headers_t { ethernet_h ethernet; ipv4_h ipv4; l4_h l4; }
struct metadata_t { bit<8> class; }

parser P(packet_in p, out headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.ethernet);
        transition select(h.ethernet.type) { 0x0800: ipv4; default: accept; }
    }
    state ipv4 {
        p.extract(h.ipv4);
        transition select(h.ipv4.protocol) { 6: l4; 17: l4; default: accept; }
    }
    state l4 { p.extract(h.l4); transition accept; }
}

control Verify(inout headers_t h, inout metadata_t m) {
    apply {
        verify_checksum(h.ipv4.isValid(),
            { h.ipv4.version, h.ipv4.ihl, h.ipv4.tos, h.ipv4.length, h.ipv4.id, h.ipv4.flags,
              h.ipv4.fragment, h.ipv4.ttl, h.ipv4.protocol, h.ipv4.src, h.ipv4.dst },
            h.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control I(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    direct_counter(CounterType.packets_and_bytes) stations;
    counter(16, CounterType.packets_and_bytes) classes;

    action drop() { mark_to_drop(s); }
    action to_station(bit<9> port) { s.egress_spec = port; stations.count(); }
    action to_nexthop(bit<9> port, bit<48> mac) {
        s.egress_spec = port;
        h.ethernet.src = h.ethernet.dst;
        h.ethernet.dst = mac;
        h.ipv4.ttl = h.ipv4.ttl - 1;
    }
    action classify(bit<8> class) { m.class = class; }

    table l2 {
        key = { h.ethernet.dst: exact; }
        actions = { to_station; @defaultonly NoAction; }
        default_action = NoAction();
        counters = stations;
        size = 4;
    }
    table route {
        key = { h.ipv4.dst: lpm; }
        actions = { to_nexthop; drop; }
        default_action = drop();
        size = 1024;
    }
    table ports {
        key = { h.l4.dst: range; h.ipv4.protocol: exact; }
        actions = { classify; NoAction; }
        default_action = NoAction();
        size = 64;
    }
    table acl {
        key = { h.ipv4.src: ternary; h.ethernet.type: optional; }
        actions = { drop; classify; NoAction; }
        default_action = NoAction();
        size = 64;
    }
    table by_ttl {
        key = { h.ipv4.ttl: exact; }
        actions = { drop; NoAction; }
        const entries = { 0: drop(); 1: drop(); }
        default_action = NoAction();
    }
    apply {
        if (s.checksum_error == 1) { drop(); exit; }
        if (l2.apply().miss) {
            if (h.ipv4.isValid()) {
                route.apply();
                switch (by_ttl.apply().action_run) { drop: { exit; } }
                if (h.l4.isValid()) { ports.apply(); }
                acl.apply();
                classes.count((bit<32>) m.class);
            } else { drop(); }
        }
    }
}
control E(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    apply { if (m.class == 7) { h.ipv4.tos = 0xb8; } }
}
control Compute(inout headers_t h, inout metadata_t m) {
    apply {
        update_checksum(h.ipv4.isValid(),
            { h.ipv4.version, h.ipv4.ihl, h.ipv4.tos, h.ipv4.length, h.ipv4.id, h.ipv4.flags,
              h.ipv4.fragment, h.ipv4.ttl, h.ipv4.protocol, h.ipv4.src, h.ipv4.dst },
            h.ipv4.checksum, HashAlgorithm.csum16);
    }
}
control D(packet_out p, in headers_t h) { apply { p.emit(h); } }
V1Switch(P(), Verify(), I(), E(), Compute(), D()) main;
