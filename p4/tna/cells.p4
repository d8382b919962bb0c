// Switch memory itself: one register for each word of a row. A frame that goes round reads one row
// into its headers, or writes one from there, while its segment keeps slot and generation. (The words
// of a tail that a frame's last row lacks are read or written beside it, and mean nothing.)

control Cells(inout headers_t hdr, inout local_metadata_t local_metadata) {
#define BANK(n, part, half, number) \
    Register<bit<32>, bit<16>>(ROWS * ROW_STRIDE) cell_w##n##half; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(cell_w##n##half) read_w##n##half = { \
        void apply(inout bit<32> word, out bit<32> value) { value = word; } \
    }; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(cell_w##n##half) write_w##n##half = { \
        void apply(inout bit<32> word) { word = hdr.part.w##n; } \
    }; \
    action do_read_w##n##half() { hdr.part.w##n = read_w##n##half.execute(local_metadata.row_index); } \
    action do_write_w##n##half() { write_w##n##half.execute(local_metadata.row_index); } \
    @hidden \
    @ways(2)    /* that always have room for two entries; every frame reads each way, which takes power */ \
    table word##n##half { \
        key = { \
            hdr.round.task          : exact; \
            local_metadata.row_bank : exact; \
            local_metadata.current  : exact; \
        } \
        actions = { do_read_w##n##half; do_write_w##n##half; @defaultonly NoAction; } \
        const default_action = NoAction(); \
        const entries = { \
            (TASK_GATHER, number, 1) : do_read_w##n##half(); \
            (TASK_STORE,  number, 1) : do_write_w##n##half(); \
        } \
        size = 2; \
    }
#define HEAD_WORD(n) CELL_BANKS(BANK, n, row_head)
#define TAIL_WORD(n) CELL_BANKS(BANK, n, row_tail)
#define APPLY_WORD(n) APPLY_BANKS(n)

    HEAD_WORDS(HEAD_WORD)
    TAIL_WORDS(TAIL_WORD)

    apply {
        HEAD_WORDS(APPLY_WORD)
        TAIL_WORDS(APPLY_WORD)
    }
}
