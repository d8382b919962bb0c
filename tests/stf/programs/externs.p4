// Registers, hashes, random, meters, digests, log messages, assert. `op` chooses.
#include <core.p4>
#include <v1model.p4>

header op_h { bit<8> op; bit<8> index; bit<32> value; }
header out_h { bit<64> result; }
header odd_h { bit<12> a; bit<4> b; bit<24> c; }
struct headers_t { op_h op; odd_h odd; out_h out_; }
struct metadata_t { bit<2> colour; bit<2> direct_colour; }
struct message_t { bit<8> index; bit<32> value; bit<9> port; }

parser P(packet_in p, out headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    state start { p.extract(h.op); p.extract(h.odd); transition accept; }
}
control V(inout headers_t h, inout metadata_t m) { apply { } }
control I(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    register<bit<20>>(16) cells;
    meter(4, MeterType.packets) packets;
    meter(4, MeterType.bytes) bytes;
    direct_meter<bit<2>>(MeterType.packets) by_index;
    action metered() { by_index.read(m.direct_colour); }
    table meters {
        key = { h.op.index: exact; }
        actions = { metered; NoAction; }
        default_action = NoAction();
        meters = by_index;
        size = 16;
    }
    apply {
        bit<16> r16 = 0;
        bit<32> r32 = 0;
        bit<64> r64 = 0;
        bit<20> cell = 0;
        s.egress_spec = 1;
        h.out_.setValid();
        if (h.op.op == 1) {
            cells.read(cell, (bit<32>) h.op.index);
            cells.write((bit<32>) h.op.index, (bit<20>) h.op.value);
            h.out_.result = (bit<64>) cell;
        } else if (h.op.op == 2) {
            hash(r16, HashAlgorithm.crc16, 16w0, { h.odd.a, h.odd.b, h.odd.c }, 32w65536);
            h.out_.result = (bit<64>) r16;
        } else if (h.op.op == 3) {
            hash(r32, HashAlgorithm.crc32, 32w0, { h.odd.a, h.odd.b, h.odd.c }, 64w0x100000000);
            h.out_.result = (bit<64>) r32;
        } else if (h.op.op == 4) {
            hash(r16, HashAlgorithm.csum16, 16w10, { h.odd.a, h.odd.c }, 32w1000);
            h.out_.result = (bit<64>) r16;
        } else if (h.op.op == 5) {
            hash(r64, HashAlgorithm.identity, 64w1, { h.odd.c, h.odd.a }, 64w0xffffffffffff);
            h.out_.result = r64;
        } else if (h.op.op == 6) {
            hash(r16, HashAlgorithm.xor16, 16w0, { h.odd.a, h.odd.b, h.odd.c }, 32w65536);
            h.out_.result = (bit<64>) r16;
        } else if (h.op.op == 7) {
            random(r32, 32w100, 32w110);
            h.out_.result = (bit<64>) r32;
        } else if (h.op.op == 8) {
            packets.execute_meter((bit<32>) h.op.index, m.colour);
            h.out_.result = (bit<64>) m.colour;
        } else if (h.op.op == 9) {
            bytes.execute_meter((bit<32>) h.op.index, m.colour);
            h.out_.result = (bit<64>) m.colour;
        } else if (h.op.op == 10) {
            meters.apply();
            h.out_.result = (bit<64>) m.direct_colour;
        } else if (h.op.op == 11) {
            digest<message_t>(1, { h.op.index, h.op.value, s.ingress_port });
        } else if (h.op.op == 12) {
            log_msg("value {} at {}", { h.op.value, h.op.index });
        } else if (h.op.op == 13) {
            assert(h.op.value != 0);
        } else if (h.op.op == 14) {
            hash(r16, HashAlgorithm.crc16, 16w5, { h.odd.a }, 32w0);
            h.out_.result = (bit<64>) r16;
        } else if (h.op.op == 15) {
            h.out_.result = (bit<64>) (h.op.value |+| 0xfffffff0);
        } else if (h.op.op == 16) {
            int<8> x = (int<8>) h.op.index;
            h.out_.result = (bit<64>) (bit<8>) (x >> 1);
        } else if (h.op.op == 17) {
            h.out_.result = (bit<64>) (h.op.value << h.op.index);
        }
    }
}
control E(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) { apply { } }
control C(inout headers_t h, inout metadata_t m) { apply { } }
control D(packet_out p, in headers_t h) { apply { p.emit(h.out_); } }
V1Switch(P(), V(), I(), E(), C(), D()) main;
