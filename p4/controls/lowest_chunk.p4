// Takes the lowest wanted chunk out of a bitmap: a priority encoder as a ternary table. Runs once a
// pass of a READ that is being served: `remaining` holds the chunks wanted, and the READ leaves with
// this chunk's number, and wanting the rest.

control LowestChunk(inout headers_t hdr, inout local_metadata_t local_metadata) {
    bit<32> rest = 0;

    // 32 bits are what a switch's gateway can test.
    action fold() {
        rest = hdr.kvcast.wanted[63:32] | hdr.kvcast.wanted[31:0];
    }

    action take(bit<8> chunk, bit<64> higher) {
        hdr.kvcast.chunk = chunk;
        hdr.kvcast.wanted = local_metadata.remaining & higher;
    }

    @name(".lowest_chunk")
    table lowest_chunk {
        key = { local_metadata.remaining : ternary @name("wanted"); }
        actions = { take; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            64w0x0000000000000001 &&& 64w0x0000000000000001 : take(0, 64w0xfffffffffffffffe);
            64w0x0000000000000002 &&& 64w0x0000000000000003 : take(1, 64w0xfffffffffffffffc);
            64w0x0000000000000004 &&& 64w0x0000000000000007 : take(2, 64w0xfffffffffffffff8);
            64w0x0000000000000008 &&& 64w0x000000000000000f : take(3, 64w0xfffffffffffffff0);
            64w0x0000000000000010 &&& 64w0x000000000000001f : take(4, 64w0xffffffffffffffe0);
            64w0x0000000000000020 &&& 64w0x000000000000003f : take(5, 64w0xffffffffffffffc0);
            64w0x0000000000000040 &&& 64w0x000000000000007f : take(6, 64w0xffffffffffffff80);
            64w0x0000000000000080 &&& 64w0x00000000000000ff : take(7, 64w0xffffffffffffff00);
            64w0x0000000000000100 &&& 64w0x00000000000001ff : take(8, 64w0xfffffffffffffe00);
            64w0x0000000000000200 &&& 64w0x00000000000003ff : take(9, 64w0xfffffffffffffc00);
            64w0x0000000000000400 &&& 64w0x00000000000007ff : take(10, 64w0xfffffffffffff800);
            64w0x0000000000000800 &&& 64w0x0000000000000fff : take(11, 64w0xfffffffffffff000);
            64w0x0000000000001000 &&& 64w0x0000000000001fff : take(12, 64w0xffffffffffffe000);
            64w0x0000000000002000 &&& 64w0x0000000000003fff : take(13, 64w0xffffffffffffc000);
            64w0x0000000000004000 &&& 64w0x0000000000007fff : take(14, 64w0xffffffffffff8000);
            64w0x0000000000008000 &&& 64w0x000000000000ffff : take(15, 64w0xffffffffffff0000);
            64w0x0000000000010000 &&& 64w0x000000000001ffff : take(16, 64w0xfffffffffffe0000);
            64w0x0000000000020000 &&& 64w0x000000000003ffff : take(17, 64w0xfffffffffffc0000);
            64w0x0000000000040000 &&& 64w0x000000000007ffff : take(18, 64w0xfffffffffff80000);
            64w0x0000000000080000 &&& 64w0x00000000000fffff : take(19, 64w0xfffffffffff00000);
            64w0x0000000000100000 &&& 64w0x00000000001fffff : take(20, 64w0xffffffffffe00000);
            64w0x0000000000200000 &&& 64w0x00000000003fffff : take(21, 64w0xffffffffffc00000);
            64w0x0000000000400000 &&& 64w0x00000000007fffff : take(22, 64w0xffffffffff800000);
            64w0x0000000000800000 &&& 64w0x0000000000ffffff : take(23, 64w0xffffffffff000000);
            64w0x0000000001000000 &&& 64w0x0000000001ffffff : take(24, 64w0xfffffffffe000000);
            64w0x0000000002000000 &&& 64w0x0000000003ffffff : take(25, 64w0xfffffffffc000000);
            64w0x0000000004000000 &&& 64w0x0000000007ffffff : take(26, 64w0xfffffffff8000000);
            64w0x0000000008000000 &&& 64w0x000000000fffffff : take(27, 64w0xfffffffff0000000);
            64w0x0000000010000000 &&& 64w0x000000001fffffff : take(28, 64w0xffffffffe0000000);
            64w0x0000000020000000 &&& 64w0x000000003fffffff : take(29, 64w0xffffffffc0000000);
            64w0x0000000040000000 &&& 64w0x000000007fffffff : take(30, 64w0xffffffff80000000);
            64w0x0000000080000000 &&& 64w0x00000000ffffffff : take(31, 64w0xffffffff00000000);
            64w0x0000000100000000 &&& 64w0x00000001ffffffff : take(32, 64w0xfffffffe00000000);
            64w0x0000000200000000 &&& 64w0x00000003ffffffff : take(33, 64w0xfffffffc00000000);
            64w0x0000000400000000 &&& 64w0x00000007ffffffff : take(34, 64w0xfffffff800000000);
            64w0x0000000800000000 &&& 64w0x0000000fffffffff : take(35, 64w0xfffffff000000000);
            64w0x0000001000000000 &&& 64w0x0000001fffffffff : take(36, 64w0xffffffe000000000);
            64w0x0000002000000000 &&& 64w0x0000003fffffffff : take(37, 64w0xffffffc000000000);
            64w0x0000004000000000 &&& 64w0x0000007fffffffff : take(38, 64w0xffffff8000000000);
            64w0x0000008000000000 &&& 64w0x000000ffffffffff : take(39, 64w0xffffff0000000000);
            64w0x0000010000000000 &&& 64w0x000001ffffffffff : take(40, 64w0xfffffe0000000000);
            64w0x0000020000000000 &&& 64w0x000003ffffffffff : take(41, 64w0xfffffc0000000000);
            64w0x0000040000000000 &&& 64w0x000007ffffffffff : take(42, 64w0xfffff80000000000);
            64w0x0000080000000000 &&& 64w0x00000fffffffffff : take(43, 64w0xfffff00000000000);
            64w0x0000100000000000 &&& 64w0x00001fffffffffff : take(44, 64w0xffffe00000000000);
            64w0x0000200000000000 &&& 64w0x00003fffffffffff : take(45, 64w0xffffc00000000000);
            64w0x0000400000000000 &&& 64w0x00007fffffffffff : take(46, 64w0xffff800000000000);
            64w0x0000800000000000 &&& 64w0x0000ffffffffffff : take(47, 64w0xffff000000000000);
            64w0x0001000000000000 &&& 64w0x0001ffffffffffff : take(48, 64w0xfffe000000000000);
            64w0x0002000000000000 &&& 64w0x0003ffffffffffff : take(49, 64w0xfffc000000000000);
            64w0x0004000000000000 &&& 64w0x0007ffffffffffff : take(50, 64w0xfff8000000000000);
            64w0x0008000000000000 &&& 64w0x000fffffffffffff : take(51, 64w0xfff0000000000000);
            64w0x0010000000000000 &&& 64w0x001fffffffffffff : take(52, 64w0xffe0000000000000);
            64w0x0020000000000000 &&& 64w0x003fffffffffffff : take(53, 64w0xffc0000000000000);
            64w0x0040000000000000 &&& 64w0x007fffffffffffff : take(54, 64w0xff80000000000000);
            64w0x0080000000000000 &&& 64w0x00ffffffffffffff : take(55, 64w0xff00000000000000);
            64w0x0100000000000000 &&& 64w0x01ffffffffffffff : take(56, 64w0xfe00000000000000);
            64w0x0200000000000000 &&& 64w0x03ffffffffffffff : take(57, 64w0xfc00000000000000);
            64w0x0400000000000000 &&& 64w0x07ffffffffffffff : take(58, 64w0xf800000000000000);
            64w0x0800000000000000 &&& 64w0x0fffffffffffffff : take(59, 64w0xf000000000000000);
            64w0x1000000000000000 &&& 64w0x1fffffffffffffff : take(60, 64w0xe000000000000000);
            64w0x2000000000000000 &&& 64w0x3fffffffffffffff : take(61, 64w0xc000000000000000);
            64w0x4000000000000000 &&& 64w0x7fffffffffffffff : take(62, 64w0x8000000000000000);
            64w0x8000000000000000 &&& 64w0xffffffffffffffff : take(63, 64w0x0000000000000000);
        }
    }

    apply {
        lowest_chunk.apply();
        fold();
        if (rest == 0) {
            local_metadata.last = 1;
        }
    }
}
