// Every way in which one frame becomes another: multicast, clones, resubmit, recirculate.
// The first byte says what to do; what each copy knows about itself is written into the frame.
#include <core.p4>
#include <v1model.p4>

header op_h { bit<8> op; bit<8> value; }
header seen_h {
    bit<8> instance; bit<8> rid; bit<8> ingress_port; bit<8> kept; bit<8> lost; bit<16> length;
}
struct headers_t { op_h op; seen_h seen; }
struct metadata_t {
    @field_list(1, 2) bit<8> kept;
    bit<8> lost;
}

parser P(packet_in p, out headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    state start { p.extract(h.op); transition accept; }
}
control V(inout headers_t h, inout metadata_t m) { apply { } }
control I(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    apply {
        if (s.instance_type == 6) {           // resubmitted
            s.egress_spec = 6;
        } else if (s.instance_type == 4) {    // recirculated
            if (h.op.value == 0) { s.egress_spec = 7; }
            else { m.kept = m.kept + 1; s.egress_spec = 8; }
        } else {
            m.kept = h.op.value;
            m.lost = h.op.value;
            s.egress_spec = 1;
            if (h.op.op == 1) { s.mcast_grp = 5; }
            if (h.op.op == 2) { clone_preserving_field_list(CloneType.I2E, 3, 1); }
            if (h.op.op == 3) { mark_to_drop(s); clone_preserving_field_list(CloneType.I2E, 3, 1); }
            if (h.op.op == 4) { resubmit_preserving_field_list(1); }
            if (h.op.op == 5) { s.egress_spec = 8; }
            if (h.op.op == 7) { truncate(3); }
            if (h.op.op == 8) { s.mcast_grp = 5; mark_to_drop(s); }
            if (h.op.op == 9) { s.mcast_grp = 77; }
            if (h.op.op == 10) { truncate(3); s.mcast_grp = 5; }
            if (h.op.op == 12) { s.egress_spec = 2; exit; }
            if (h.op.op == 13) { s.priority = 1; }
            h.op.value = 0xee;
            if (h.op.op == 14) { h.op.setInvalid(); }
        }
    }
}
control E(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    apply {
        if (s.egress_port == 8) {             // go round until kept is 3
            h.op.op = 5;
            if (m.kept == 3) { h.op.value = 0; } else { h.op.value = 1; }
            recirculate_preserving_field_list(2);
        } else {
            if (h.op.op == 11) { truncate(4); }
            if (s.instance_type == 0 && (h.op.op == 6 || h.op.op == 11)) {
                clone_preserving_field_list(CloneType.E2E, 4, 1);
            }
            if (s.egress_rid == 99) { mark_to_drop(s); }
            h.seen.setValid();
            h.seen.instance = (bit<8>) s.instance_type;
            h.seen.rid = (bit<8>) s.egress_rid;
            h.seen.ingress_port = (bit<8>) s.ingress_port;
            h.seen.kept = m.kept;
            h.seen.lost = m.lost;
            h.seen.length = (bit<16>) s.packet_length;
        }
    }
}
control C(inout headers_t h, inout metadata_t m) { apply { } }
control D(packet_out p, in headers_t h) { apply { p.emit(h); } }
V1Switch(P(), V(), I(), E(), C(), D()) main;
