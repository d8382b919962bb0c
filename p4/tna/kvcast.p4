// kvcast on TNA: Tofino 1, and with KVCAST_TOFINO2 Tofino 2. The same switch as v1model/kvcast.p4,
// in another order: a hardware pipeline looks up for every frame, all at once, what v1model looks up
// only for frames that need it, and later tables decide by the results.
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
#include "../controls/write_class.p4"
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
#include "../controls/write_copy.p4"
#include "../controls/served_data.p4"
#include "parser.p4"
#include "delivery.p4"

// What a stateful ALU takes from the packet must lie in whole words, or the crossbar cannot bring it.
@pa_container_size("ingress", "local_metadata.fingerprint", 32)
@pa_container_size("ingress", "local_metadata.clock", 32)
@pa_container_size("ingress", "local_metadata.now", 32)
@pa_container_size("ingress", "local_metadata.port_bits", 32)
// Two tables that write one container cannot share a stage, so what they find out side by side must
// not be packed together.
@pa_solitary("ingress", "local_metadata.enabled")
@pa_solitary("ingress", "local_metadata.admitted")
@pa_solitary("ingress", "local_metadata.formed")
@pa_solitary("ingress", "local_metadata.permitted")
@pa_solitary("ingress", "local_metadata.resident")
@pa_solitary("ingress", "local_metadata.current")
@pa_solitary("ingress", "local_metadata.refused")
@pa_solitary("ingress", "local_metadata.heat_on")
@pa_solitary("ingress", "local_metadata.to_router")
control KvcastIngress(inout headers_t hdr, inout local_metadata_t local_metadata,
                      in ingress_intrinsic_metadata_t intrinsic,
                      in ingress_intrinsic_metadata_from_parser_t from_parser,
                      inout ingress_intrinsic_metadata_for_deparser_t deparser,
                      inout ingress_intrinsic_metadata_for_tm_t tm) {
    Arrival() arrival;
    Settings() settings;
    Clock() clock;
    FrameClass() frame_class;
    WriteClass() write_class;
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
        local_metadata.first_row =
            first_row.get({ 4w0, local_metadata.slot[5:0], hdr.kvcast.chunk[5:0] });
    }

    action tell_bank() {
        local_metadata.bank = bank.get({ 7w0, local_metadata.slot[6:6] });
    }

    // One table, one condition: a Tofino 1 cannot do anything beside a block of several stages.
    apply {
        // What is it, who sends it, where would it go, and is its segment here? All at once.
        arrival.apply(hdr, local_metadata, intrinsic, from_parser);
        settings.apply(local_metadata);
        forwarding.apply(hdr, local_metadata);
        resident.apply(hdr, local_metadata);
        if (hdr.kvcast.isValid() && hdr.round.task == TASK_NONE) {
            frame_class.apply(hdr, local_metadata);
        }
        if (hdr.bth.isValid()) {
            write_class.apply(hdr, local_metadata);
        }
        port_guard.apply(hdr, local_metadata, intrinsic.ingress_port);
        chunk_bit.apply(hdr, local_metadata);
        block_hash.apply(hdr, local_metadata);
        clock.apply(local_metadata);
        heat_window.apply(local_metadata);
        rounds.apply(hdr, local_metadata);
        slot_validity.apply(hdr, local_metadata);
        cells.apply(hdr, local_metadata);

        // May its sender send it, and where would it go by its address alone?
        if (hdr.round.task == TASK_NONE) {
            gate.apply(local_metadata);
        } else if (hdr.round.task == TASK_NEXT) {
            serving_pass.apply(hdr, local_metadata, hdr.round.generation);
        }
        reader_group.apply(hdr, local_metadata);
        if (local_metadata.refused == 0 && local_metadata.serving == 0 && local_metadata.passing == 0) {
            route.apply(local_metadata);
        }

        // Switch memory: fill from DATA, answer READs.
        fill_decision.apply(hdr, local_metadata);
        serving_decision.apply(hdr, local_metadata);
        lowest_chunk.apply(hdr, local_metadata);
        tell_first_row();
        tell_bank();
        fill.apply(hdr, local_metadata, tm);

        // Everything else goes where it is addressed, except a READ whose answer is on the way, and
        // an answer for which others wait too.
        pending.apply(hdr, local_metadata);
        heat.apply(hdr, local_metadata, deparser);
        coalescing.apply(hdr, local_metadata);
        if (local_metadata.is_answer == 1) {
            port_set.apply(local_metadata, local_metadata.shared_bits);
        }

        decisions.apply(local_metadata);
        departure.apply(hdr, local_metadata, intrinsic, tm);
    }
}

control KvcastEgress(inout headers_t hdr, inout local_metadata_t local_metadata,
                     in egress_intrinsic_metadata_t intrinsic,
                     in egress_intrinsic_metadata_from_parser_t from_parser,
                     inout egress_intrinsic_metadata_for_deparser_t deparser,
                     inout egress_intrinsic_metadata_for_output_port_t output) {
    EgressHost() egress_host;
    WriteCopy() write_copy;
    ServedData() served_data;

    apply {
        if (intrinsic.egress_rid == RECIRCULATE_RID) {
            hdr.round.task = hdr.round.again;
        }
        if (hdr.round.task == TASK_NONE) {
            local_metadata.last = hdr.round.last[0:0];
            local_metadata.rewritten = hdr.round.rewritten[0:0];
            local_metadata.port_bits = hdr.round.port_bits;
            if (hdr.round.delivery == DELIVER_WRITE_SHARED) {
                write_copy.apply(hdr, local_metadata, hdr.round.ingress_port, intrinsic.egress_port);
                if (local_metadata.member == 0) {
                    deparser.drop_ctl = 1;
                }
            } else {
                if (hdr.round.delivery == DELIVER_SERVE
                    || hdr.round.delivery == DELIVER_SERVE_GROUP) {
                    served_data.apply(hdr, local_metadata);
                }
                if (hdr.round.delivery == DELIVER_SHARED
                    || hdr.round.delivery == DELIVER_SERVE_GROUP) {
                    egress_host.apply(hdr, local_metadata, intrinsic.egress_port);
                    if (local_metadata.member == 0) {
                        deparser.drop_ctl = 1;
                    }
                } else if (hdr.round.delivery == DELIVER_FLOOD) {
                    if (intrinsic.egress_port == hdr.round.ingress_port) {
                        deparser.drop_ctl = 1;
                    }
                }
            }
            hdr.round.setInvalid();
        }
    }
}

Pipeline(KvcastIngressParser(), KvcastIngress(), KvcastIngressDeparser(),
         KvcastEgressParser(), KvcastEgress(), KvcastEgressDeparser()) pipe;

// Every field of local_metadata_t starts as 0.
@pa_auto_init_metadata
Switch(pipe) main;
