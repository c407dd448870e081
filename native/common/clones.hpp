// Instruction sets are chosen when the library is loaded: one binary runs everywhere.
#pragma once

// A function marked SMB_CLONES is compiled for AVX-512, AVX2 and the plain machine, and the loader
// picks one. Built with -ffp-contract=off, so all three round alike. Sanitizers start after the
// loader's choice and crash in it, so their builds take the plain variant.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(SMB_NO_CLONES)
#define SMB_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SMB_CLONES
#endif
