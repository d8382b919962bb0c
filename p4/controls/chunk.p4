// Decides which chunk a pass is about. `LowestChunk`: the lowest wanted one, which the pass serves,
// and the bitmap without it. `ChunkBit`: the bit of the chunk that DATA carries. Entries in place of
// a variable shift and a priority encoder, which a match-action stage has not.

control LowestChunk(inout headers_t hdr, inout meta_t meta) {
    action set_lowest(bit<8> chunk, bit<64> others) {
        hdr.kvcast.chunk = chunk;
        hdr.kvcast.wanted = hdr.kvcast.wanted & others;
    }
    table lowest_chunk {
        key = { hdr.kvcast.wanted : ternary; }
        actions = { set_lowest; NoAction; }
        const default_action = NoAction();
        const entries = {
            0x0000000000000001 &&& 0x0000000000000001 : set_lowest(0, 0xfffffffffffffffe);
            0x0000000000000002 &&& 0x0000000000000003 : set_lowest(1, 0xfffffffffffffffd);
            0x0000000000000004 &&& 0x0000000000000007 : set_lowest(2, 0xfffffffffffffffb);
            0x0000000000000008 &&& 0x000000000000000f : set_lowest(3, 0xfffffffffffffff7);
            0x0000000000000010 &&& 0x000000000000001f : set_lowest(4, 0xffffffffffffffef);
            0x0000000000000020 &&& 0x000000000000003f : set_lowest(5, 0xffffffffffffffdf);
            0x0000000000000040 &&& 0x000000000000007f : set_lowest(6, 0xffffffffffffffbf);
            0x0000000000000080 &&& 0x00000000000000ff : set_lowest(7, 0xffffffffffffff7f);
            0x0000000000000100 &&& 0x00000000000001ff : set_lowest(8, 0xfffffffffffffeff);
            0x0000000000000200 &&& 0x00000000000003ff : set_lowest(9, 0xfffffffffffffdff);
            0x0000000000000400 &&& 0x00000000000007ff : set_lowest(10, 0xfffffffffffffbff);
            0x0000000000000800 &&& 0x0000000000000fff : set_lowest(11, 0xfffffffffffff7ff);
            0x0000000000001000 &&& 0x0000000000001fff : set_lowest(12, 0xffffffffffffefff);
            0x0000000000002000 &&& 0x0000000000003fff : set_lowest(13, 0xffffffffffffdfff);
            0x0000000000004000 &&& 0x0000000000007fff : set_lowest(14, 0xffffffffffffbfff);
            0x0000000000008000 &&& 0x000000000000ffff : set_lowest(15, 0xffffffffffff7fff);
            0x0000000000010000 &&& 0x000000000001ffff : set_lowest(16, 0xfffffffffffeffff);
            0x0000000000020000 &&& 0x000000000003ffff : set_lowest(17, 0xfffffffffffdffff);
            0x0000000000040000 &&& 0x000000000007ffff : set_lowest(18, 0xfffffffffffbffff);
            0x0000000000080000 &&& 0x00000000000fffff : set_lowest(19, 0xfffffffffff7ffff);
            0x0000000000100000 &&& 0x00000000001fffff : set_lowest(20, 0xffffffffffefffff);
            0x0000000000200000 &&& 0x00000000003fffff : set_lowest(21, 0xffffffffffdfffff);
            0x0000000000400000 &&& 0x00000000007fffff : set_lowest(22, 0xffffffffffbfffff);
            0x0000000000800000 &&& 0x0000000000ffffff : set_lowest(23, 0xffffffffff7fffff);
            0x0000000001000000 &&& 0x0000000001ffffff : set_lowest(24, 0xfffffffffeffffff);
            0x0000000002000000 &&& 0x0000000003ffffff : set_lowest(25, 0xfffffffffdffffff);
            0x0000000004000000 &&& 0x0000000007ffffff : set_lowest(26, 0xfffffffffbffffff);
            0x0000000008000000 &&& 0x000000000fffffff : set_lowest(27, 0xfffffffff7ffffff);
            0x0000000010000000 &&& 0x000000001fffffff : set_lowest(28, 0xffffffffefffffff);
            0x0000000020000000 &&& 0x000000003fffffff : set_lowest(29, 0xffffffffdfffffff);
            0x0000000040000000 &&& 0x000000007fffffff : set_lowest(30, 0xffffffffbfffffff);
            0x0000000080000000 &&& 0x00000000ffffffff : set_lowest(31, 0xffffffff7fffffff);
            0x0000000100000000 &&& 0x00000001ffffffff : set_lowest(32, 0xfffffffeffffffff);
            0x0000000200000000 &&& 0x00000003ffffffff : set_lowest(33, 0xfffffffdffffffff);
            0x0000000400000000 &&& 0x00000007ffffffff : set_lowest(34, 0xfffffffbffffffff);
            0x0000000800000000 &&& 0x0000000fffffffff : set_lowest(35, 0xfffffff7ffffffff);
            0x0000001000000000 &&& 0x0000001fffffffff : set_lowest(36, 0xffffffefffffffff);
            0x0000002000000000 &&& 0x0000003fffffffff : set_lowest(37, 0xffffffdfffffffff);
            0x0000004000000000 &&& 0x0000007fffffffff : set_lowest(38, 0xffffffbfffffffff);
            0x0000008000000000 &&& 0x000000ffffffffff : set_lowest(39, 0xffffff7fffffffff);
            0x0000010000000000 &&& 0x000001ffffffffff : set_lowest(40, 0xfffffeffffffffff);
            0x0000020000000000 &&& 0x000003ffffffffff : set_lowest(41, 0xfffffdffffffffff);
            0x0000040000000000 &&& 0x000007ffffffffff : set_lowest(42, 0xfffffbffffffffff);
            0x0000080000000000 &&& 0x00000fffffffffff : set_lowest(43, 0xfffff7ffffffffff);
            0x0000100000000000 &&& 0x00001fffffffffff : set_lowest(44, 0xffffefffffffffff);
            0x0000200000000000 &&& 0x00003fffffffffff : set_lowest(45, 0xffffdfffffffffff);
            0x0000400000000000 &&& 0x00007fffffffffff : set_lowest(46, 0xffffbfffffffffff);
            0x0000800000000000 &&& 0x0000ffffffffffff : set_lowest(47, 0xffff7fffffffffff);
            0x0001000000000000 &&& 0x0001ffffffffffff : set_lowest(48, 0xfffeffffffffffff);
            0x0002000000000000 &&& 0x0003ffffffffffff : set_lowest(49, 0xfffdffffffffffff);
            0x0004000000000000 &&& 0x0007ffffffffffff : set_lowest(50, 0xfffbffffffffffff);
            0x0008000000000000 &&& 0x000fffffffffffff : set_lowest(51, 0xfff7ffffffffffff);
            0x0010000000000000 &&& 0x001fffffffffffff : set_lowest(52, 0xffefffffffffffff);
            0x0020000000000000 &&& 0x003fffffffffffff : set_lowest(53, 0xffdfffffffffffff);
            0x0040000000000000 &&& 0x007fffffffffffff : set_lowest(54, 0xffbfffffffffffff);
            0x0080000000000000 &&& 0x00ffffffffffffff : set_lowest(55, 0xff7fffffffffffff);
            0x0100000000000000 &&& 0x01ffffffffffffff : set_lowest(56, 0xfeffffffffffffff);
            0x0200000000000000 &&& 0x03ffffffffffffff : set_lowest(57, 0xfdffffffffffffff);
            0x0400000000000000 &&& 0x07ffffffffffffff : set_lowest(58, 0xfbffffffffffffff);
            0x0800000000000000 &&& 0x0fffffffffffffff : set_lowest(59, 0xf7ffffffffffffff);
            0x1000000000000000 &&& 0x1fffffffffffffff : set_lowest(60, 0xefffffffffffffff);
            0x2000000000000000 &&& 0x3fffffffffffffff : set_lowest(61, 0xdfffffffffffffff);
            0x4000000000000000 &&& 0x7fffffffffffffff : set_lowest(62, 0xbfffffffffffffff);
            0x8000000000000000 &&& 0xffffffffffffffff : set_lowest(63, 0x7fffffffffffffff);
        }
        size = 64;
    }
    apply { lowest_chunk.apply(); }
}

control ChunkBit(in headers_t hdr, inout meta_t meta) {
    action set_chunk_bit(bit<64> chunk_bit) { meta.chunk_bit = chunk_bit; }
    action no_chunk_bit() { meta.chunk_bit = 0; }
    table chunk_bit {
        key = { hdr.kvcast.chunk : exact; }
        actions = { set_chunk_bit; no_chunk_bit; }
        const default_action = no_chunk_bit();
        const entries = {
            0 : set_chunk_bit(0x0000000000000001);
            1 : set_chunk_bit(0x0000000000000002);
            2 : set_chunk_bit(0x0000000000000004);
            3 : set_chunk_bit(0x0000000000000008);
            4 : set_chunk_bit(0x0000000000000010);
            5 : set_chunk_bit(0x0000000000000020);
            6 : set_chunk_bit(0x0000000000000040);
            7 : set_chunk_bit(0x0000000000000080);
            8 : set_chunk_bit(0x0000000000000100);
            9 : set_chunk_bit(0x0000000000000200);
            10 : set_chunk_bit(0x0000000000000400);
            11 : set_chunk_bit(0x0000000000000800);
            12 : set_chunk_bit(0x0000000000001000);
            13 : set_chunk_bit(0x0000000000002000);
            14 : set_chunk_bit(0x0000000000004000);
            15 : set_chunk_bit(0x0000000000008000);
            16 : set_chunk_bit(0x0000000000010000);
            17 : set_chunk_bit(0x0000000000020000);
            18 : set_chunk_bit(0x0000000000040000);
            19 : set_chunk_bit(0x0000000000080000);
            20 : set_chunk_bit(0x0000000000100000);
            21 : set_chunk_bit(0x0000000000200000);
            22 : set_chunk_bit(0x0000000000400000);
            23 : set_chunk_bit(0x0000000000800000);
            24 : set_chunk_bit(0x0000000001000000);
            25 : set_chunk_bit(0x0000000002000000);
            26 : set_chunk_bit(0x0000000004000000);
            27 : set_chunk_bit(0x0000000008000000);
            28 : set_chunk_bit(0x0000000010000000);
            29 : set_chunk_bit(0x0000000020000000);
            30 : set_chunk_bit(0x0000000040000000);
            31 : set_chunk_bit(0x0000000080000000);
            32 : set_chunk_bit(0x0000000100000000);
            33 : set_chunk_bit(0x0000000200000000);
            34 : set_chunk_bit(0x0000000400000000);
            35 : set_chunk_bit(0x0000000800000000);
            36 : set_chunk_bit(0x0000001000000000);
            37 : set_chunk_bit(0x0000002000000000);
            38 : set_chunk_bit(0x0000004000000000);
            39 : set_chunk_bit(0x0000008000000000);
            40 : set_chunk_bit(0x0000010000000000);
            41 : set_chunk_bit(0x0000020000000000);
            42 : set_chunk_bit(0x0000040000000000);
            43 : set_chunk_bit(0x0000080000000000);
            44 : set_chunk_bit(0x0000100000000000);
            45 : set_chunk_bit(0x0000200000000000);
            46 : set_chunk_bit(0x0000400000000000);
            47 : set_chunk_bit(0x0000800000000000);
            48 : set_chunk_bit(0x0001000000000000);
            49 : set_chunk_bit(0x0002000000000000);
            50 : set_chunk_bit(0x0004000000000000);
            51 : set_chunk_bit(0x0008000000000000);
            52 : set_chunk_bit(0x0010000000000000);
            53 : set_chunk_bit(0x0020000000000000);
            54 : set_chunk_bit(0x0040000000000000);
            55 : set_chunk_bit(0x0080000000000000);
            56 : set_chunk_bit(0x0100000000000000);
            57 : set_chunk_bit(0x0200000000000000);
            58 : set_chunk_bit(0x0400000000000000);
            59 : set_chunk_bit(0x0800000000000000);
            60 : set_chunk_bit(0x1000000000000000);
            61 : set_chunk_bit(0x2000000000000000);
            62 : set_chunk_bit(0x4000000000000000);
            63 : set_chunk_bit(0x8000000000000000);
        }
        size = 64;
    }
    apply { chunk_bit.apply(); }
}
