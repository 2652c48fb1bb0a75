/* The smallest program: a multi-layer perceptron learns to tell two rings of points apart, on two devices.
 *
 *   cc mlp.c $(pkg-config --cflags --libs whale) -lm -o mlp && ./mlp [devices]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <whale/whale.h>

enum { BATCH = 64, HIDDEN = 32, STEPS = 200 };

/* Every fallible call returns NULL or a status that says what went wrong. */
static void check(whale_status* status) {
  if (status == NULL) return;
  whale_str message = whale_status_message(status), op = whale_status_op(status);
  fprintf(stderr, "error: %.*s%s%.*s\n", (int)message.size, message.data, op.size ? " at op " : "", (int)op.size,
          op.data);
  whale_status_release(status);
  exit(1);
}

static whale_value op(whale_graph* g, whale_str name, const whale_value* inputs, size_t count) {
  whale_value out[3];
  size_t n = 0;
  check(whale_graph_op(g, name, inputs, count, NULL, 0, NULL, out, 3, &n));
  return out[0];
}

/* y = x w + b, the weights drawn from a normal distribution. */
static whale_value linear(whale_graph* g, whale_str name, whale_value x, int64_t in, int64_t out) {
  whale_scope_options scope = WHALE_SCOPE_OPTIONS_INIT;
  scope.kind = WHALE_SCOPE_NAME;
  scope.name = name;
  check(whale_graph_scope_begin(g, &scope)); /* the parameters are named "NAME.weight", "NAME.bias" */
  whale_parameter_options normal = WHALE_PARAMETER_OPTIONS_INIT;
  normal.init = WHALE_INIT_NORMAL;
  normal.b = sqrt(2.0 / (double)in);
  whale_value xwb[3] = {x, WHALE_NONE, WHALE_NONE};
  const int64_t weight[2] = {in, out};
  check(whale_graph_parameter(g, WHALE_STR("weight"), WHALE_F32, weight, 2, &normal, &xwb[1]));
  check(whale_graph_parameter(g, WHALE_STR("bias"), WHALE_F32, &out, 1, NULL, &xwb[2]));
  whale_value y = op(g, WHALE_STR("matmul"), xwb, 3);
  check(whale_graph_scope_end(g));
  return y;
}

int main(int argc, char** argv) {
  whale_str devices = WHALE_STR("ref:2");
  if (argc > 1) {
    devices.data = argv[1];
    for (devices.size = 0; argv[1][devices.size] != '\0';) ++devices.size;
  }
  whale_engine* engine;
  check(whale_engine_create(NULL, &engine));

  /* 1. The model, an ordinary local program on the whole batch. */
  whale_graph* g;
  check(whale_graph_create(engine, WHALE_STR("mlp"), &g));
  whale_value x, label, loss[2];
  const int64_t x_dims[2] = {BATCH, 2}, label_dims[1] = {BATCH};
  check(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, x_dims, 2, 0, &x));
  check(whale_graph_input(g, WHALE_STR("label"), WHALE_I32, label_dims, 1, 0, &label));
  whale_scope_options replica = WHALE_SCOPE_OPTIONS_INIT; /* the annotation: cut the batch over the devices */
  replica.kind = WHALE_SCOPE_REPLICA;
  check(whale_graph_scope_begin(g, &replica));
  whale_value h = linear(g, WHALE_STR("hidden"), x, 2, HIDDEN);
  h = op(g, WHALE_STR("relu"), &h, 1);
  loss[0] = linear(g, WHALE_STR("head"), h, HIDDEN, 2);
  loss[1] = label;
  h = op(g, WHALE_STR("cross_entropy"), loss, 2);
  h = op(g, WHALE_STR("reduce_mean"), &h, 1);
  check(whale_graph_scope_end(g));
  whale_training_options training = WHALE_TRAINING_OPTIONS_INIT;
  training.optimizer = WHALE_OPTIMIZER_ADAM;
  training.learning_rate = 1e-2;
  check(whale_graph_minimize(g, h, &training));
  check(whale_graph_seal(g));

  /* 2. Where it runs. */
  whale_cluster* cluster;
  whale_plan* plan;
  whale_text summary;
  check(whale_cluster_create(engine, devices, &cluster));
  check(whale_plan_create(engine, g, cluster, NULL, &plan));
  check(whale_plan_summary(plan, &summary));
  printf("%s\n", summary.data);
  whale_text_release(&summary);

  /* 3. Train. */
  whale_session* session;
  check(whale_session_create(engine, plan, NULL, &session));
  static float points[BATCH][2];
  static int32_t labels[BATCH];
  int32_t inputs[2], output; /* numbers of ports: looked up once */
  whale_tensor *fed[2], *fetched = NULL; /* made by the first step, written into by the others */
  check(whale_session_input(session, WHALE_STR("x"), &inputs[0]));
  check(whale_session_input(session, WHALE_STR("label"), &inputs[1]));
  check(whale_session_output(session, WHALE_STR("loss"), &output));
  check(whale_tensor_view(WHALE_F32, x_dims, 2, points, &fed[0]));
  check(whale_tensor_view(WHALE_I32, label_dims, 1, labels, &fed[1]));
  float first = 0, last = 0;
  for (int step = 0; step < STEPS; ++step) {
    for (int i = 0; i < BATCH; ++i) {
      const double angle = (step * BATCH + i) * 0.618034 * 6.2831853;
      labels[i] = i % 2;
      points[i][0] = (float)((1 + labels[i]) * cos(angle));
      points[i][1] = (float)((1 + labels[i]) * sin(angle));
    }
    whale_event* event;
    int32_t done;
    check(whale_session_step(session, inputs, fed, 2, &output, &fetched, 1, NULL, &event));
    check(whale_event_wait(event, -1, &done));
    whale_event_release(event);
    last = *(const float*)whale_tensor_data(fetched);
    if (step == 0) first = last;
    if (step % 50 == 0 || step == STEPS - 1) printf("step %3d  loss %.4f\n", step, last);
  }

  whale_tensor_release(fetched);
  whale_tensor_release(fed[0]);
  whale_tensor_release(fed[1]);
  whale_session_release(session);
  whale_plan_release(plan);
  whale_cluster_release(cluster);
  whale_graph_release(g);
  whale_engine_release(engine);
  return last < 0.5f * first ? 0 : 1;
}
