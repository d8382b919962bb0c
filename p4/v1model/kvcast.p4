// kvcast's data plane for v1model (BMv2's simple_switch, kvcast's switchsim): an in-network memory
// pool for KV-cache blocks on the path between inference nodes. docs/architecture.md tells the story;
// the order of the `apply` calls below is the order of the decisions.

#include <core.p4>
#include <v1model.p4>

#include "../generated/kvcast_headers.p4"
#include "../sizes.p4"
#include "../types.p4"
#include "../controls/forwarding.p4"
#include "../controls/frame_form.p4"
#include "../controls/guard.p4"
#include "../controls/reader_group.p4"
#include "../controls/resident.p4"
#include "../controls/chunk.p4"
#include "../controls/serving.p4"
#include "../controls/read_decision.p4"
#include "../controls/port_set.p4"
#include "../controls/outcomes.p4"
#include "../controls/egress_copy.p4"
#include "parser.p4"
#include "pending.p4"
#include "cells.p4"
#include "heat.p4"

control KvcastIngress(inout headers_t hdr, inout meta_t meta,
                      inout standard_metadata_t standard) {
    counter(SLOTS, CounterType.packets_and_bytes) resident_hits;

    Forwarding() forwarding;
    FrameForm() form;
    PortGuard() ports;
    NamespaceGuard() namespaces;
    BucketOwner() owners;
    ReaderGroup() groups;
    ResidentLookup() residents;
    FillDecision() filling;
    SlotValidity() validity;
    ServeDecision() serving;
    LowestChunk() lowest;
    Cells() cells;
    PendingIndex() pending_index;
    Pending() pending;
    ReadDecision() reads;
    Heat() heat;
    PortSet() port_sets;
    Outcomes() outcomes;

    action set_settings(bit<8> enabled, bit<32> lease_ticks, bit<32> heat_threshold) {
        meta.enabled = enabled;
        meta.lease_ticks = lease_ticks;
        meta.heat_threshold = heat_threshold;
    }
    // Off until a controller says otherwise: a plain top-of-rack switch.
    table settings {
        actions = { set_settings; }
        default_action = set_settings(0, 0, 0);
    }

    // Who sends this, and may it? A served READ on a later pass was asked on its first.
    action admit_served() { meta.admitted = 1; }

    apply {
        meta.now = standard.ingress_global_timestamp[37:6];
        settings.apply();
        if (hdr.ethernet.isValid()) { forwarding.apply(hdr, meta); }

        if (meta.enabled == 0 && hdr.ethernet.isValid()) {
            meta.decision = DECIDE_FORWARDED;
        } else if (standard.parser_error != error.NoError) {
            meta.decision = DECIDE_DROPPED;
        } else if (!hdr.kvcast.isValid()) {
            meta.decision = DECIDE_FORWARDED;
        } else {
            form.apply(hdr, meta);
            if (meta.well_formed == 0) {
                meta.decision = DECIDE_DROPPED;
            } else {
                if (meta.serving == 1) {
                    admit_served();
                } else {
                    ports.apply(hdr, meta, standard.ingress_port);
                    if (meta.admitted == 1) {
                        if (hdr.kvcast.op == OP_READ) {
                            namespaces.apply(hdr, meta, standard.ingress_port);
                            groups.apply(hdr, meta);
                        } else {
                            owners.apply(hdr, meta, standard.ingress_port);
                        }
                    }
                }
                if (meta.admitted == 0) { meta.decision = DECIDE_GUARDED; }
            }
        }

        if (meta.decision == DECIDE_NOTHING) {
            // The resident tier: serve, or fill in passing.
            if (hdr.kvcast.op == OP_READ || hdr.kvcast.op == OP_DATA) {
                residents.apply(hdr, meta);
                if (meta.resident == 1) {
                    if (hdr.kvcast.op == OP_DATA) { filling.apply(hdr, meta); }
                    validity.apply(hdr, meta);
                    if (hdr.kvcast.op == OP_READ) { serving.apply(hdr, meta); }
                    if (meta.copy == COPY_SERVE) { lowest.apply(hdr, meta); }
                    if (meta.copy == COPY_SERVE || meta.fill == FILL_FILLED) {
                        cells.apply(hdr, meta);
                    }
                }
            }

            if (meta.copy == COPY_SERVE) {
                if (meta.serving == 1) {
                    meta.decision = DECIDE_SERVING;
                } else {
                    meta.decision = DECIDE_HIT;
                    resident_hits.count(meta.slot);
                }
                meta.serving = 1;
                standard.mcast_grp = meta.serve_group;
            } else if (meta.serving == 1) {
                // The slot was given away while it was being served: the home sends the rest.
                hdr.kvcast.flags = hdr.kvcast.flags | FLAG_PARTIAL;
                meta.decision = DECIDE_PARTIAL;
            } else {
                // The pending table: wait, or ask; and answer whoever waits.
                pending_index.apply(hdr, meta);
                if (hdr.kvcast.op == OP_READ) {
                    if (hdr.kvcast.wanted == FULL_SEGMENT &&
                        hdr.kvcast.flags & FLAG_PARTIAL == 0) {
                        meta.coalesce = 1;
                    }
                } else if (hdr.kvcast.op != OP_OFFER && hdr.kvcast.flags & FLAG_PARTIAL == 0) {
                    meta.coalesce = 1;
                    if (hdr.kvcast.op == OP_MISS || hdr.kvcast.flags & FLAG_LAST != 0) {
                        meta.clear = 1;
                    }
                }
                if (meta.coalesce == 1) { pending.apply(hdr, meta); }

                if (hdr.kvcast.op == OP_READ) {
                    meta.decision = DECIDE_PARTIAL;
                    if (meta.coalesce == 1) { reads.apply(hdr, meta); }
                    heat.apply(hdr, meta);
                } else {
                    meta.decision = DECIDE_UNICAST;
                    meta.copy_bits = meta.waiting | meta.egress_bit;
                    if (meta.copy_bits != meta.egress_bit) {
                        meta.decision = DECIDE_SHARED;
                        meta.copy = COPY_SHARED;
                        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
                        port_sets.apply(meta, standard.mcast_grp);
                    }
                }
            }
        }

        if (meta.decision == DECIDE_DROPPED || meta.decision == DECIDE_GUARDED ||
            meta.decision == DECIDE_JOIN) {
            mark_to_drop(standard);
        } else if (meta.copy == COPY_PLAIN) {
            if (meta.route == ROUTE_PORT) {
                standard.egress_spec = meta.egress_port;
            } else if (meta.route == ROUTE_FLOOD) {
                meta.copy = COPY_FLOOD;
                standard.mcast_grp = ALL_PORTS_GROUP;
            } else {
                meta.decision = DECIDE_DROPPED;
                mark_to_drop(standard);
            }
        }
        outcomes.apply(meta);
    }
}

control KvcastEgress(inout headers_t hdr, inout meta_t meta,
                     inout standard_metadata_t standard) {
    EgressCopy() copies;
    ServedData() served;

    apply {
        if (meta.copy == COPY_SERVE && standard.egress_rid == RECIRCULATE_RID) {
            if (hdr.kvcast.wanted == 0) {
                mark_to_drop(standard);
            } else {
                hdr.cell.setInvalid();
                recirculate_preserving_field_list(FIELDS_SERVING);
            }
        } else if (meta.copy == COPY_SERVE || meta.copy == COPY_SHARED) {
            if (meta.copy == COPY_SERVE) { served.apply(hdr, meta); }
            copies.apply(hdr, meta, standard.egress_port);
            if (meta.copy_bits == 0) {
                mark_to_drop(standard);
            } else {
                meta.rewritten = 1;
                hdr.udp.checksum = 0;
            }
        } else if (meta.copy == COPY_FLOOD) {
            if (standard.egress_port == standard.ingress_port) { mark_to_drop(standard); }
        }
    }
}

V1Switch(KvcastParser(), VerifyChecksums(), KvcastIngress(), KvcastEgress(), UpdateChecksums(),
         KvcastDeparser()) main;
