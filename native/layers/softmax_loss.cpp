#include "softmax_loss.hpp"

#include <algorithm>
#include <cmath>

namespace layers {

namespace {

// The gradient's row becomes softmax; returns -log softmax[label]. A NaN anywhere gives NaN, as torch does.
float row_loss(const float* x, float* p, size_t classes, size_t label) {
  const float top = *std::max_element(x, x + classes);
  float sum = 0;
  for (size_t c = 0; c < classes; ++c) sum += p[c] = std::exp(x[c] - top);
  for (size_t c = 0; c < classes; ++c) p[c] /= sum;
  return std::log(sum) - (x[label] - top);
}

}  // namespace

SoftmaxLoss softmax_loss(const float* scores, const float* labels, float* gradient, size_t rows, size_t classes,
                         bool ignoring, float ignored, float largest) {
  SoftmaxLoss result{0.0, 0, -1};
  for (size_t row = 0; row < rows; ++row, scores += classes, gradient += classes) {
    const float label = labels[row];
    if (ignoring && std::trunc(label) == ignored) {
      std::fill(gradient, gradient + classes, 0.0f);
      continue;
    }
    if (!(label > -1.0f && label < static_cast<float>(classes))) {  // so that NaN is refused too
      result.bad = static_cast<long long>(row);
      return result;
    }
    const auto index = static_cast<size_t>(std::max(label, 0.0f));
    const float loss = row_loss(scores, gradient, classes, index);
    result.sum += loss > largest ? largest : loss;
    gradient[index] -= 1.0f;
    ++result.kept;
  }
  return result;
}

}  // namespace layers
