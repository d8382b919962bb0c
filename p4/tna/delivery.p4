// Turns intrinsic metadata into the program's terms, and back: Arrival at the start of ingress,
// Rounds for a frame that comes round, Departure at the end of ingress.

control Arrival(inout headers_t hdr, inout local_metadata_t local_metadata,
                in ingress_intrinsic_metadata_t intrinsic,
                in ingress_intrinsic_metadata_from_parser_t from_parser) {
    apply {
        local_metadata.now = from_parser.global_tstamp[47:16];   // a tick is 2^16 ns
        local_metadata.loop_port = intrinsic.ingress_port;
        local_metadata.loop_port[6:0] = RECIRCULATION_PORT;
        local_metadata.loop_group = LOOP_GROUP;
        local_metadata.loop_group[1:0] = intrinsic.ingress_port[8:7];
    }
}

// A frame that gathers gets headers for the next row. It and one that stores go on only while their
// segment keeps slot and generation.
control Rounds(inout headers_t hdr, inout local_metadata_t local_metadata) {
    action gather() {
        hdr.row_head.setValid();
        hdr.row_tail.setValid();
    }

    action gather_last_row() {
        hdr.row_head.setValid();
    }

    @name(".round_task")
    table round_task {
        key = {
            hdr.round.task : exact   @name("task");
            hdr.round.row  : ternary @name("row");
        }
        actions = { gather; gather_last_row; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (TASK_GATHER, LAST_ROW) : gather_last_row();
            (TASK_GATHER, _)        : gather();
        }
        size = 2;
    }

    apply {
        round_task.apply();
        if (local_metadata.resident == 1 && local_metadata.generation == hdr.round.generation) {
            local_metadata.current = 1;
        }
    }
}

control Departure(inout headers_t hdr, inout local_metadata_t local_metadata,
                  in ingress_intrinsic_metadata_t intrinsic,
                  inout ingress_intrinsic_metadata_for_tm_t tm) {
    action describe() {
        hdr.round.delivery = local_metadata.delivery;
        hdr.round.rewritten[0:0] = local_metadata.rewritten;
        hdr.round.ingress_port = intrinsic.ingress_port;
        hdr.round.serve_group = local_metadata.serve_group;
        hdr.round.port_bits = local_metadata.port_bits;
        hdr.round.generation = local_metadata.generation;
    }

    action nowhere() { }

    action unicast() {
        hdr.round.task = TASK_NONE;
        tm.ucast_egress_port = local_metadata.out_port;
    }

    action multicast() {
        hdr.round.task = TASK_NONE;
        tm.mcast_grp_a = local_metadata.group;
    }

    // A READ that is being served: one frame gathers this chunk; another goes round for the next, if
    // there is one.
    action split() {
        hdr.round.task = TASK_GATHER;
        hdr.round.again = TASK_NEXT;
        hdr.round.row = LAST_ROW;
        hdr.round.bank = local_metadata.bank;
        hdr.round.index = local_metadata.first_row + (bit<16>)LAST_ROW * ROW_STRIDE;
        tm.ucast_egress_port = local_metadata.loop_port;
        tm.mcast_grp_b = local_metadata.loop_group;
    }

    action split_last() {
        hdr.round.task = TASK_GATHER;
        hdr.round.row = LAST_ROW;
        hdr.round.last = 1;
        hdr.round.bank = local_metadata.bank;
        hdr.round.index = local_metadata.first_row + (bit<16>)LAST_ROW * ROW_STRIDE;
        tm.ucast_egress_port = local_metadata.loop_port;
    }

    action gather_on() {
        hdr.round.row = hdr.round.row - 1;
        hdr.round.index = hdr.round.index - ROW_STRIDE;
        tm.ucast_egress_port = local_metadata.loop_port;
    }

    action gathered() {
        hdr.round.task = TASK_NONE;
        tm.mcast_grp_a = local_metadata.serve_group;
    }

    action store_on() {
        hdr.round.row = hdr.round.row + 1;
        hdr.round.index = hdr.round.index + ROW_STRIDE;
        hdr.row_head.setInvalid();
        hdr.row_tail.setInvalid();
        tm.ucast_egress_port = local_metadata.loop_port;
    }

    @name(".departure")
    table departure {
        key = {
            hdr.round.task          : ternary @name("task");
            hdr.round.row           : ternary @name("row");
            local_metadata.current  : ternary @name("current");
            local_metadata.serving  : ternary @name("serving");
            local_metadata.last     : ternary @name("last");
            local_metadata.refused  : ternary @name("refused");
            local_metadata.delivery : ternary @name("delivery");
        }
        actions = {
            nowhere; unicast; multicast; split; split_last; gather_on; gathered; store_on;
        }
        const default_action = nowhere();
        const entries = {
            // task        row       current serving last refused delivery
            (_,            _,        _, 1, 0, _, _)               : split();
            (_,            _,        _, 1, 1, _, _)               : split_last();
            (TASK_NONE,    _,        _, _, _, 1, _)               : nowhere();
            (TASK_NONE,    _,        _, _, _, _, DELIVER_UNICAST) : unicast();
            (TASK_NONE,    _,        _, _, _, _, DELIVER_FLOOD)   : multicast();
            (TASK_NONE,    _,        _, _, _, _, DELIVER_SHARED)  : multicast();
            (TASK_NONE,    _,        _, _, _, _, DELIVER_WRITE_SHARED) : multicast();
            (TASK_NEXT,    _,        _, _, _, _, DELIVER_UNICAST) : unicast();
            (TASK_GATHER,  0,        1, _, _, _, _)               : gathered();
            (TASK_GATHER,  _,        1, _, _, _, _)               : gather_on();
            (TASK_STORE,   LAST_ROW, _, _, _, _, _)               : nowhere();
            (TASK_STORE,   _,        1, _, _, _, _)               : store_on();
        }
        size = 16;
    }

    apply {
        if (hdr.round.task == TASK_NONE || local_metadata.kind == KIND_PARTIAL_READ) {
            describe();
        }
        departure.apply();
    }
}

// Sends a copy of DATA round, which stores its chunk. Runs before Departure, which decides about the
// frame itself.
control Fill(inout headers_t hdr, inout local_metadata_t local_metadata,
             inout ingress_intrinsic_metadata_for_tm_t tm) {
    action fill() {
        hdr.round.again = TASK_STORE;
        hdr.round.bank = local_metadata.bank;
        hdr.round.index = local_metadata.first_row;
        tm.mcast_grp_b = local_metadata.loop_group;
    }

    apply {
        if (local_metadata.fill == FILL_FILLED) {
            fill();
        }
    }
}
