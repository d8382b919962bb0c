// An action profile, and an action selector that hashes a flow over a group of members.
#include <core.p4>
#include <v1model.p4>

header flow_h { bit<8> kind; bit<16> flow; bit<8> group; }
struct headers_t { flow_h flow; }
struct metadata_t { }
parser P(packet_in p, out headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    state start { p.extract(h.flow); transition accept; }
}
control V(inout headers_t h, inout metadata_t m) { apply { } }
control I(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    action_profile(8) shared;
    action_selector(HashAlgorithm.crc16, 32w8, 32w16) spread;
    action to_port(bit<9> port) { s.egress_spec = port; }
    action drop() { mark_to_drop(s); }
    table pick {
        key = { h.flow.group: exact; }
        actions = { to_port; drop; NoAction; }
        implementation = shared;
        size = 8;
    }
    table balance {
        key = { h.flow.group: exact; h.flow.flow: selector; }
        actions = { to_port; drop; NoAction; }
        implementation = spread;
        size = 8;
    }
    apply {
        s.egress_spec = 9;
        if (h.flow.kind == 1) { pick.apply(); } else { balance.apply(); }
    }
}
control E(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) { apply { } }
control C(inout headers_t h, inout metadata_t m) { apply { } }
control D(packet_out p, in headers_t h) { apply { p.emit(h); } }
V1Switch(P(), V(), I(), E(), C(), D()) main;
