// Switch memory itself: one register for each word of a row. A frame that goes round reads one row
// into its headers, or writes one from there, while its segment keeps slot and generation. (The words
// of a tail that a frame's last row lacks are read or written beside it, and mean nothing.)

control Cells(inout headers_t hdr, inout state_t state) {
#define CELL_WORD(n, part) \
    Register<bit<32>, bit<16>>(ROWS * CELLS) cell_w##n; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(cell_w##n) read_w##n = { \
        void apply(inout bit<32> word, out bit<32> value) { value = word; } \
    }; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(cell_w##n) write_w##n = { \
        void apply(inout bit<32> word) { word = hdr.part.w##n; } \
    }; \
    action do_read_w##n() { hdr.part.w##n = read_w##n.execute(state.row_index); } \
    action do_write_w##n() { write_w##n.execute(state.row_index); } \
    @hidden \
    table word##n { \
        key = { hdr.round.task : exact; state.current : exact; } \
        actions = { do_read_w##n; do_write_w##n; @defaultonly NoAction; } \
        const default_action = NoAction(); \
        const entries = { \
            (TASK_GATHER, 1) : do_read_w##n(); \
            (TASK_STORE,  1) : do_write_w##n(); \
        } \
        size = 2; \
    }
#define HEAD_WORD(n) CELL_WORD(n, row_head)
#define TAIL_WORD(n) CELL_WORD(n, row_tail)
#define APPLY_WORD(n) word##n.apply();

    HEAD_WORDS(HEAD_WORD)
    TAIL_WORDS(TAIL_WORD)

    apply {
        HEAD_WORDS(APPLY_WORD)
        TAIL_WORDS(APPLY_WORD)
    }
}
