// Moves a transfer over a socket until it is finished.
#pragma once

#include <functional>

#include "transfer.hpp"

namespace smb::net {

// Both directions at once, so that neither end waits for the other. timeout_ns without a byte moved is an error.
// interrupted is asked now and then: true gives the transfer up, and what is under way is
// waited for a little. ticking: calls that block on fd come back by themselves (SO_RCVTIMEO), so that they may be
// used to wait. Throws LineError and Nonsense.
void drive(Transfer& transfer, int fd, bool ticking, int64_t timeout_ns, const std::function<bool()>& interrupted);

}  // namespace smb::net
