// Header stacks, a union, varbit fields, lookahead, advance, verify, and signed fields.
#include <core.p4>
#include <v1model.p4>

error { BadMark }
header kind_h { bit<8> kind; }
header label_h { bit<7> value; bit<1> bottom; }
header short_h { bit<8> type; bit<8> v; }
header long_h { bit<8> type; bit<32> v; }
header_union either_u { short_h short; long_h long; }
header options_h { bit<8> length; varbit<64> data; }
header signed_h { int<8> a; int<8> b; bit<8> less; }
header error_h { bit<8> code; bit<8> length; }
struct headers_t {
    error_h err; kind_h kind; label_h[3] labels; either_u either; options_h options; signed_h num;
}
struct metadata_t { }

parser P(packet_in p, out headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.kind);
        transition select(h.kind.kind) {
            1: labels; 2: either; 3: options; 4: numbers; 5: marked; 6: skip; default: accept;
        }
    }
    state labels {
        p.extract(h.labels.next);
        transition select(h.labels.last.bottom) { 0: labels; default: accept; }
    }
    state either {
        transition select(p.lookahead<bit<8>>()) { 1: short; 2: long; default: accept; }
    }
    state short { p.extract(h.either.short); transition accept; }
    state long { p.extract(h.either.long); transition accept; }
    state options {
        bit<8> length = p.lookahead<bit<8>>();
        p.extract(h.options, (bit<32>) length * 8);
        transition accept;
    }
    state numbers { p.extract(h.num); transition accept; }
    state marked {
        verify(p.lookahead<bit<16>>() == 0xbeef, error.BadMark);
        transition accept;
    }
    state skip { p.advance(16); transition accept; }
}
control V(inout headers_t h, inout metadata_t m) { apply { } }
control I(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.err.setValid();
        if (s.parser_error == error.NoError) { h.err.code = 0; }
        else if (s.parser_error == error.PacketTooShort) { h.err.code = 1; }
        else if (s.parser_error == error.StackOutOfBounds) { h.err.code = 2; }
        else if (s.parser_error == error.BadMark) { h.err.code = 3; }
        else if (s.parser_error == error.HeaderTooShort) { h.err.code = 4; }
        else { h.err.code = 99; }
        if (h.labels[0].isValid()) {
            if (h.labels[0].value == 1) {
                h.labels.push_front(1);
                h.labels[0].setValid();
                h.labels[0].value = 0x55;
            } else if (h.labels[0].value == 2) {
                h.labels.pop_front(1);
            }
        }
        if (h.either.short.isValid()) {
            h.either.long.setValid();
            h.either.long.type = 2;
            h.either.long.v = 0x01020304;
        }
        if (h.num.isValid()) {
            h.num.less = h.num.a < h.num.b ? 8w1 : 8w0;
            h.num.a = h.num.a + h.num.b;
            h.num.b = h.num.b |-| 100;
        }
    }
}
control E(inout headers_t h, inout metadata_t m, inout standard_metadata_t s) {
    apply { h.err.length = (bit<8>) s.packet_length; }
}
control C(inout headers_t h, inout metadata_t m) { apply { } }
control D(packet_out p, in headers_t h) {
    apply {
        p.emit(h.err); p.emit(h.kind); p.emit(h.labels); p.emit(h.either); p.emit(h.options);
        p.emit(h.num);
    }
}
V1Switch(P(), V(), I(), E(), C(), D()) main;
