#pragma once

namespace smb {

// One turn of a short wait: tells the processor that nothing else is to be done.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace smb
