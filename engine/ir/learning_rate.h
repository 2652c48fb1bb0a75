// What a learning rate may be, of an optimizer and of a session.
#pragma once

namespace whale {

constexpr double kLargestLearningRate = 1e30;  // its products with gradients stay far from where f64 ends

}  // namespace whale
