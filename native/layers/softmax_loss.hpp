// The multinomial logistic loss over softmax scores, with its gradient, in one pass over few scores.
#pragma once

#include <cstddef>

namespace layers {

struct SoftmaxLoss {
  double sum;      // of the losses of the rows that count
  long long kept;  // how many those are
  long long bad;   // the first row whose label is out of range, -1 when none is; then nothing else holds
};

// scores, gradient: (rows, classes) floats, contiguous; they don't overlap. labels: (rows) floats, truncated.
// A row's loss is -log softmax[label], at most `largest`; its gradient is softmax - [class is the label].
// Where `ignoring` and the label is `ignored`, both are 0.
SoftmaxLoss softmax_loss(const float* scores, const float* labels, float* gradient, size_t rows, size_t classes,
                         bool ignoring, float ignored, float largest);

}  // namespace layers
