// A chunk's number as a bit of its segment's bitmap; no bit for a chunk that the resident segment does
// not have. Runs after Resident, on DATA.

control ChunkBit(inout headers_t hdr, inout local_metadata_t local_metadata) {
    // No shifts by a variable in a switch's ALUs: a table instead.
    action set_chunk_bit(bit<64> bit_of_chunk) {
        local_metadata.chunk_bit = bit_of_chunk;
    }

    @name(".chunk_bit")
    table chunk_bits {
        key = { hdr.kvcast.chunk : exact @name("chunk"); }
        actions = { set_chunk_bit; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
             0 : set_chunk_bit(64w0x0000000000000001);
             1 : set_chunk_bit(64w0x0000000000000002);
             2 : set_chunk_bit(64w0x0000000000000004);
             3 : set_chunk_bit(64w0x0000000000000008);
             4 : set_chunk_bit(64w0x0000000000000010);
             5 : set_chunk_bit(64w0x0000000000000020);
             6 : set_chunk_bit(64w0x0000000000000040);
             7 : set_chunk_bit(64w0x0000000000000080);
             8 : set_chunk_bit(64w0x0000000000000100);
             9 : set_chunk_bit(64w0x0000000000000200);
            10 : set_chunk_bit(64w0x0000000000000400);
            11 : set_chunk_bit(64w0x0000000000000800);
            12 : set_chunk_bit(64w0x0000000000001000);
            13 : set_chunk_bit(64w0x0000000000002000);
            14 : set_chunk_bit(64w0x0000000000004000);
            15 : set_chunk_bit(64w0x0000000000008000);
            16 : set_chunk_bit(64w0x0000000000010000);
            17 : set_chunk_bit(64w0x0000000000020000);
            18 : set_chunk_bit(64w0x0000000000040000);
            19 : set_chunk_bit(64w0x0000000000080000);
            20 : set_chunk_bit(64w0x0000000000100000);
            21 : set_chunk_bit(64w0x0000000000200000);
            22 : set_chunk_bit(64w0x0000000000400000);
            23 : set_chunk_bit(64w0x0000000000800000);
            24 : set_chunk_bit(64w0x0000000001000000);
            25 : set_chunk_bit(64w0x0000000002000000);
            26 : set_chunk_bit(64w0x0000000004000000);
            27 : set_chunk_bit(64w0x0000000008000000);
            28 : set_chunk_bit(64w0x0000000010000000);
            29 : set_chunk_bit(64w0x0000000020000000);
            30 : set_chunk_bit(64w0x0000000040000000);
            31 : set_chunk_bit(64w0x0000000080000000);
            32 : set_chunk_bit(64w0x0000000100000000);
            33 : set_chunk_bit(64w0x0000000200000000);
            34 : set_chunk_bit(64w0x0000000400000000);
            35 : set_chunk_bit(64w0x0000000800000000);
            36 : set_chunk_bit(64w0x0000001000000000);
            37 : set_chunk_bit(64w0x0000002000000000);
            38 : set_chunk_bit(64w0x0000004000000000);
            39 : set_chunk_bit(64w0x0000008000000000);
            40 : set_chunk_bit(64w0x0000010000000000);
            41 : set_chunk_bit(64w0x0000020000000000);
            42 : set_chunk_bit(64w0x0000040000000000);
            43 : set_chunk_bit(64w0x0000080000000000);
            44 : set_chunk_bit(64w0x0000100000000000);
            45 : set_chunk_bit(64w0x0000200000000000);
            46 : set_chunk_bit(64w0x0000400000000000);
            47 : set_chunk_bit(64w0x0000800000000000);
            48 : set_chunk_bit(64w0x0001000000000000);
            49 : set_chunk_bit(64w0x0002000000000000);
            50 : set_chunk_bit(64w0x0004000000000000);
            51 : set_chunk_bit(64w0x0008000000000000);
            52 : set_chunk_bit(64w0x0010000000000000);
            53 : set_chunk_bit(64w0x0020000000000000);
            54 : set_chunk_bit(64w0x0040000000000000);
            55 : set_chunk_bit(64w0x0080000000000000);
            56 : set_chunk_bit(64w0x0100000000000000);
            57 : set_chunk_bit(64w0x0200000000000000);
            58 : set_chunk_bit(64w0x0400000000000000);
            59 : set_chunk_bit(64w0x0800000000000000);
            60 : set_chunk_bit(64w0x1000000000000000);
            61 : set_chunk_bit(64w0x2000000000000000);
            62 : set_chunk_bit(64w0x4000000000000000);
            63 : set_chunk_bit(64w0x8000000000000000);
        }
    }

    apply {
        chunk_bits.apply();
        local_metadata.chunk_bit = local_metadata.chunk_bit & local_metadata.chunk_mask;
    }
}
