// One 32-bit hash of a segment's name, for the pending interest table (index and fingerprint) and two
// rows of the heat sketch.

control BlockHash(inout headers_t hdr, inout local_metadata_t local_metadata) {
    apply {
        hash(local_metadata.hash, HashAlgorithm.crc32, 32w0,
             { hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment }, 64w0x100000000);
    }
}
