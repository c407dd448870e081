#include "frames.hpp"

#include <cstdarg>
#include <cstdio>

namespace smb::net {

Refusal refuse(uint16_t status, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return {status, text};
}

}  // namespace smb::net
