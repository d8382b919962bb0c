// One of each thing that P4Runtime can name: every match kind, direct and indirect counters and
// meters, a register, a digest, clones, multicast, an action profile, an action selector, const,
// preset and ageing tables, and controller headers whose fields do not end on byte boundaries.
//
// The whole data plane can be driven by packet-out and watched by packet-in, so the same tests
// run on any P4Runtime target, with no port attached.
//
// Rebuild: p4c-bm2-ss --p4runtime-files everything.p4info.txtpb -o everything.json everything.p4

#include <core.p4>
#include <v1model.p4>

const bit<9> CPU_PORT = 255;
const bit<16> PROBE_TYPE = 0x88B5;  // IEEE 802 local experimental ethertype 1

const bit<8> FIELD_LIST_CLONE = 1;

// packet-out with bypass = 1 leaves by egress_port unprocessed; with 0 it runs the pipeline.
@controller_header("packet_out")
header packet_out_h {
    bit<9> egress_port;
    bit<1> bypass;
    bit<6> pad;
}

@controller_header("packet_in")
header packet_in_h {
    bit<9>  ingress_port;
    bit<3>  reason;
    bit<4>  instance_type;
    bit<16> rid;
}

header ethernet_h {
    bit<48> dst;
    bit<48> src;
    bit<16> type;
}

// A probe carries the keys that the tables match, and brings back what they decided.
header probe_h {
    bit<8>  op;
    bit<16> index;
    bit<32> key;
    bit<32> value;
    bit<16> lpm_mark;
    bit<16> ternary_mark;
    bit<16> range_mark;
    bit<16> optional_mark;
    bit<16> select_mark;
    bit<16> fixed_mark;
    bit<8>  color;
    bit<32> register_value;
}

struct headers_t {
    packet_out_h packet_out;
    packet_in_h  packet_in;
    ethernet_h   ethernet;
    probe_h      probe;
}

struct seen_t {
    bit<48> src;
    bit<9>  port;
    bit<16> index;
}

struct local_metadata_t {
    @field_list(FIELD_LIST_CLONE)
    bit<9>  ingress_port;
    @field_list(FIELD_LIST_CLONE)
    bit<3>  reason;
    bit<2>  color;
}

parser ProbeParser(packet_in packet, out headers_t hdr, inout local_metadata_t local_metadata,
                   inout standard_metadata_t standard) {
    state start {
        transition select(standard.ingress_port) {
            CPU_PORT: from_controller;
            default: ethernet;
        }
    }
    state from_controller {
        packet.extract(hdr.packet_out);
        transition ethernet;
    }
    state ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.type) {
            PROBE_TYPE: probe;
            default: accept;
        }
    }
    state probe {
        packet.extract(hdr.probe);
        transition accept;
    }
}

control NoVerify(inout headers_t hdr, inout local_metadata_t local_metadata) { apply {} }
control NoCompute(inout headers_t hdr, inout local_metadata_t local_metadata) { apply {} }

control ProbeIngress(inout headers_t hdr, inout local_metadata_t local_metadata,
                     inout standard_metadata_t standard) {
    direct_counter(CounterType.packets_and_bytes) forward_counter;
    direct_counter(CounterType.packets) acl_counter;
    direct_meter<bit<2>>(MeterType.packets) acl_meter;
    counter(16, CounterType.packets_and_bytes) cells;
    counter(4, CounterType.packets) packets_only;
    meter(8, MeterType.packets) policer;
    register<bit<32>>(16) words;
    action_profile(8) profile;
    @max_group_size(4)
    action_selector(HashAlgorithm.crc16, 16, 14) balancer;

    action drop() {
        mark_to_drop(standard);
    }
    action set_port(bit<9> port) {
        standard.egress_spec = port;
    }
    action multicast(bit<16> group) {
        standard.mcast_grp = group;
    }
    action to_cpu(bit<3> reason) {
        local_metadata.reason = reason;
        standard.egress_spec = CPU_PORT;
    }
    action learn() {
        digest<seen_t>(1, { hdr.ethernet.src, standard.ingress_port, hdr.probe.index });
        mark_to_drop(standard);
    }
    action mirror(bit<32> session) {
        clone_preserving_field_list(CloneType.I2E, session, FIELD_LIST_CLONE);
    }

    table forward {
        key = { hdr.ethernet.dst: exact @name("dst"); }
        actions = { set_port; multicast; to_cpu; learn; mirror; drop; }
        counters = forward_counter;
        default_action = drop();
        size = 64;
    }

    action set_lpm(bit<16> mark) { hdr.probe.lpm_mark = mark; }
    table route {
        key = { hdr.probe.key: lpm @name("key"); }
        actions = { set_lpm; NoAction; }
        default_action = NoAction();
        size = 64;
    }

    action set_ternary(bit<16> mark) {
        hdr.probe.ternary_mark = mark;
        acl_meter.read(local_metadata.color);
    }
    action deny() { mark_to_drop(standard); exit; }
    table acl {
        key = {
            hdr.probe.key: ternary @name("key");
            hdr.probe.op: exact @name("op");
        }
        actions = { set_ternary; deny; @defaultonly NoAction; }
        counters = acl_counter;
        meters = acl_meter;
        default_action = NoAction();
        size = 64;
    }

    action set_range(bit<16> mark) { hdr.probe.range_mark = mark; }
    table window {
        key = {
            hdr.probe.value: range @name("value");
            hdr.probe.op: exact @name("op");
        }
        actions = { set_range; NoAction; }
        default_action = NoAction();
        size = 64;
    }

    action set_optional(bit<16> mark) { hdr.probe.optional_mark = mark; }
    table choice {
        key = {
            hdr.probe.index: optional @name("index");
            hdr.probe.op: optional @name("op");
        }
        actions = { set_optional; NoAction; }
        default_action = NoAction();
        size = 64;
    }

    action set_select(bit<16> mark) { hdr.probe.select_mark = mark; }
    table spread {
        key = {
            hdr.probe.op: exact @name("op");
            hdr.probe.value: selector;
        }
        actions = { set_select; NoAction; }
        implementation = balancer;
        size = 16;
    }
    table picked {
        key = { hdr.probe.key: exact @name("key"); }
        actions = { set_select; NoAction; }
        implementation = profile;
        size = 16;
    }

    action set_fixed(bit<16> mark) { hdr.probe.fixed_mark = mark; }
    table fixed_entries {
        key = { hdr.probe.op: exact @name("op"); }
        actions = { set_fixed; NoAction; }
        const default_action = NoAction();
        const entries = {
            1: set_fixed(101);
            2: set_fixed(102);
        }
    }

    table small {
        key = { hdr.probe.index: exact @name("index"); }
        actions = { set_fixed; NoAction; }
        default_action = NoAction();
        size = 2;
    }

    table ageing {
        key = { hdr.ethernet.src: exact @name("src"); }
        actions = { NoAction; }
        default_action = NoAction();
        support_timeout = true;
        size = 16;
    }

    apply {
        local_metadata.ingress_port = standard.ingress_port;
        if (hdr.packet_out.isValid()) {
            if (hdr.packet_out.bypass == 1) {
                standard.egress_spec = hdr.packet_out.egress_port;
                hdr.packet_out.setInvalid();
                exit;
            }
            hdr.packet_out.setInvalid();
        }
        ageing.apply();
        forward.apply();
        if (hdr.probe.isValid()) {
            route.apply();
            acl.apply();
            window.apply();
            choice.apply();
            spread.apply();
            picked.apply();
            fixed_entries.apply();
            small.apply();
            // BMv2 does not survive an index beyond the end of an array.
            bit<32> index = (bit<32>) hdr.probe.index;
            cells.count(index & 15);
            packets_only.count(index & 3);
            if (hdr.probe.op == 7) {
                policer.execute_meter(index & 7, local_metadata.color);
            }
            if (hdr.probe.op == 8) {
                words.write(index & 15, hdr.probe.value);
            }
            words.read(hdr.probe.register_value, index & 15);
            hdr.probe.color = (bit<8>) local_metadata.color;
        }
    }
}

control ProbeEgress(inout headers_t hdr, inout local_metadata_t local_metadata,
                    inout standard_metadata_t standard) {
    apply {
        if (standard.egress_port == CPU_PORT) {
            hdr.packet_out.setInvalid();
            hdr.packet_in.setValid();
            hdr.packet_in.ingress_port = local_metadata.ingress_port;
            hdr.packet_in.reason = local_metadata.reason;
            hdr.packet_in.instance_type = (bit<4>) standard.instance_type;
            hdr.packet_in.rid = standard.egress_rid;
        }
    }
}

control ProbeDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.probe);
    }
}

V1Switch(ProbeParser(), NoVerify(), ProbeIngress(), ProbeEgress(), NoCompute(),
         ProbeDeparser()) main;
