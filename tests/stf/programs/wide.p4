// 1 KiB in four fields of 2048 bits, the widest that p4c takes, kept in registers.
#include <core.p4>
#include <v1model.p4>

header op_h { bit<8> op; bit<8> index; }
header cell_h { bit<2048> a; bit<2048> b; bit<2048> c; bit<2048> d; }
struct headers_t { op_h op; cell_h cell; }
struct metadata_t { }
parser P(packet_in p, out headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.op);
        transition select(h.op.op) { 1: cell; default: accept; }
    }
    state cell { p.extract(h.cell); transition accept; }
}
control V(inout headers_t h, inout metadata_t m) { apply { } }
control I(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    register<bit<2048>>(256) as_;
    register<bit<2048>>(256) bs;
    register<bit<2048>>(256) cs;
    register<bit<2048>>(256) ds;
    apply {
        bit<32> i = (bit<32>) h.op.index;
        s.egress_spec = 1;
        if (h.op.op == 1) {
            as_.write(i, h.cell.a); bs.write(i, h.cell.b);
            cs.write(i, h.cell.c); ds.write(i, h.cell.d);
            s.mcast_grp = 1;
        } else {
            h.cell.setValid();
            as_.read(h.cell.a, i); bs.read(h.cell.b, i);
            cs.read(h.cell.c, i); ds.read(h.cell.d, i);
        }
    }
}
control E(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    apply { if (s.egress_rid == 1) { mark_to_drop(s); } }
}
control C(inout headers_t h, inout metadata_t m) { apply { } }
control D(packet_out p, in headers_t h) { apply { p.emit(h); } }
V1Switch(P(), V(), I(), E(), C(), D()) main;
