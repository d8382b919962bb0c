// kvcast on TNA: Tofino 1, and with KVCAST_TOFINO2 Tofino 2. The same switch as v1model/kvcast.p4,
// in another order: what v1model asks only of frames that need it, a hardware pipeline asks of all
// at once, and decides by the answers.
//
// A chunk is larger than what a frame can read from registers in one pass. So a READ that is served
// goes round once for each chunk, leaving behind a frame that goes round once for each row of the
// chunk; only the whole chunk is replicated. DATA that fills goes on its way at once, and a copy of
// it goes round once for each row.

#include "arch.p4"
#include "../types.p4"
#include "headers.p4"
#include "ports.p4"
#include "../controls/settings.p4"
#include "../controls/frame_class.p4"
#include "../controls/port_guard.p4"
#include "../controls/gate.p4"
#include "../controls/reader_group.p4"
#include "../controls/resident.p4"
#include "../controls/chunk_bit.p4"
#include "../controls/fill_decision.p4"
#include "slots.p4"
#include "../controls/serving_decision.p4"
#include "../controls/serving_pass.p4"
#include "../controls/lowest_chunk.p4"
#include "cells.p4"
#include "../controls/forwarding.p4"
#include "../controls/route.p4"
#include "block_hash.p4"
#include "pending.p4"
#include "heat.p4"
#include "../controls/port_set.p4"
#include "../controls/decisions.p4"
#include "../controls/egress_host.p4"
#include "../controls/served_data.p4"
#include "parser.p4"
#include "delivery.p4"

// What a stateful ALU takes from the packet must lie in whole words, or the crossbar cannot bring it.
@pa_container_size("ingress", "state.fingerprint", 32)
@pa_container_size("ingress", "state.clock", 32)
@pa_container_size("ingress", "state.now", 32)
@pa_container_size("ingress", "state.port_bits", 32)
// Two tables that write one container cannot share a stage, so what they find out side by side must
// not be packed together.
@pa_solitary("ingress", "state.enabled")
@pa_solitary("ingress", "state.admitted")
@pa_solitary("ingress", "state.permitted")
@pa_solitary("ingress", "state.resident")
@pa_solitary("ingress", "state.current")
@pa_solitary("ingress", "state.refused")
@pa_solitary("ingress", "state.heat_on")
@pa_solitary("ingress", "state.to_router")
control KvcastIngress(inout headers_t hdr, inout state_t state,
                      in ingress_intrinsic_metadata_t intrinsic,
                      in ingress_intrinsic_metadata_from_parser_t from_parser,
                      inout ingress_intrinsic_metadata_for_deparser_t deparser,
                      inout ingress_intrinsic_metadata_for_tm_t tm) {
    Arrival() arrival;
    Settings() settings;
    Clock() clock;
    FrameClass() frame_class;
    PortGuard() port_guard;
    Gate() gate;
    ReaderGroup() reader_group;
    Resident() resident;
    ChunkBit() chunk_bit;
    FillDecision() fill_decision;
    SlotValidity() slot_validity;
    ServingDecision() serving_decision;
    ServingPass() serving_pass;
    LowestChunk() lowest_chunk;
    Rounds() rounds;
    Cells() cells;
    Forwarding() forwarding;
    Route() route;
    BlockHash() block_hash;
    Pending() pending;
    Coalescing() coalescing;
    HeatWindow() heat_window;
    Heat() heat;
    PortSet() port_set;
    Decisions() decisions;
    Fill() fill;
    Departure() departure;

    // Bits of several fields side by side come by the hash unit: a stage's ALUs take two sources.
    Hash<bit<16>>(HashAlgorithm_t.IDENTITY) first_row;
    Hash<bit<8>>(HashAlgorithm_t.IDENTITY) bank;

    action tell_first_row() {
        state.first_row = first_row.get({ 4w0, state.slot[5:0], hdr.kvcast.chunk[5:0] });
    }

    action tell_bank() {
        state.bank = bank.get({ 7w0, state.slot[6:6] });
    }

    // One table, one condition: a Tofino 1 cannot do anything beside a block of several stages.
    apply {
        // What is it, who sends it, where would it go, and is its segment here? All at once.
        arrival.apply(hdr, state, intrinsic, from_parser);
        settings.apply(state);
        forwarding.apply(hdr, state);
        resident.apply(hdr, state);
        if (hdr.kvcast.isValid() && hdr.round.task == TASK_NONE) {
            frame_class.apply(hdr, state);
        }
        port_guard.apply(hdr, state, intrinsic.ingress_port);
        chunk_bit.apply(hdr, state);
        block_hash.apply(hdr, state);
        clock.apply(state);
        heat_window.apply(state);
        rounds.apply(hdr, state);
        slot_validity.apply(hdr, state);
        cells.apply(hdr, state);

        // May it, and what would become of it by its address alone?
        if (hdr.round.task == TASK_NONE) {
            gate.apply(state);
        } else if (hdr.round.task == TASK_NEXT) {
            serving_pass.apply(hdr, state, hdr.round.generation);
        }
        reader_group.apply(hdr, state);
        if (state.refused == 0 && state.serving == 0 && state.passing == 0) {
            route.apply(state);
        }

        // Switch memory: fill from DATA, answer READs.
        fill_decision.apply(hdr, state);
        serving_decision.apply(hdr, state);
        lowest_chunk.apply(hdr, state);
        tell_first_row();
        tell_bank();
        fill.apply(hdr, state, tm);

        // Everything else goes where it is addressed, unless its answer is on the way, or others
        // wait for it too.
        pending.apply(hdr, state);
        heat.apply(hdr, state, deparser);
        coalescing.apply(hdr, state);
        if (state.is_answer == 1) {
            port_set.apply(state, state.shared_bits);
        }

        decisions.apply(state);
        departure.apply(hdr, state, intrinsic, tm);
    }
}

control KvcastEgress(inout headers_t hdr, inout state_t state,
                     in egress_intrinsic_metadata_t intrinsic,
                     in egress_intrinsic_metadata_from_parser_t from_parser,
                     inout egress_intrinsic_metadata_for_deparser_t deparser,
                     inout egress_intrinsic_metadata_for_output_port_t output) {
    EgressHost() egress_host;
    ServedData() served_data;

    apply {
        if (intrinsic.egress_rid == RECIRCULATE_RID) {
            hdr.round.task = hdr.round.again;
        }
        if (hdr.round.task == TASK_NONE) {
            state.last = hdr.round.last[0:0];
            state.rewritten = hdr.round.rewritten[0:0];
            state.port_bits = hdr.round.port_bits;
            if (hdr.round.delivery == DELIVER_SERVE || hdr.round.delivery == DELIVER_SERVE_GROUP) {
                served_data.apply(hdr, state);
            }
            if (hdr.round.delivery == DELIVER_SHARED
                || hdr.round.delivery == DELIVER_SERVE_GROUP) {
                egress_host.apply(hdr, state, intrinsic.egress_port);
                if (state.member == 0) {
                    deparser.drop_ctl = 1;
                }
            } else if (hdr.round.delivery == DELIVER_FLOOD) {
                if (intrinsic.egress_port == hdr.round.ingress_port) {
                    deparser.drop_ctl = 1;
                }
            }
            hdr.round.setInvalid();
        }
    }
}

Pipeline(KvcastIngressParser(), KvcastIngress(), KvcastIngressDeparser(),
         KvcastEgressParser(), KvcastEgress(), KvcastEgressDeparser()) pipe;

// Every field of state_t starts as 0.
@pa_auto_init_metadata
Switch(pipe) main;
