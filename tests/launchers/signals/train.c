/* What a host in another language calls: signals whose handlers differ, and some steps in the world that the environment says. */
#include <signal.h>
#include <stdio.h>
#include <whale/whale.h>

enum { COUNT = 8, BATCH = 8, IN = 4, OUT = 3 };
static const int signals[COUNT] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGHUP, SIGTERM, SIGINT};
static const char* const names[COUNT] = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGHUP", "SIGTERM", "SIGINT"};
static struct sigaction before[COUNT];

void remember_handlers(void) {
  for (int i = 0; i < COUNT; ++i) sigaction(signals[i], NULL, &before[i]);
}

/* The bytes behind the kernel's signals are whatever they are. */
static int same(const sigset_t* a, const sigset_t* b) {
  for (int number = 1; number <= 64; ++number)
    if (sigismember(a, number) != sigismember(b, number)) return 0;
  return 1;
}

/* How many are others now; prints their names. Where none is the program's own in the beginning, that is no test: -1. */
int other_handlers(void) {
  int others = 0;
  for (int i = 0; i < COUNT; ++i) {
    struct sigaction now;
    sigaction(signals[i], NULL, &now);
    if (before[i].sa_handler == SIG_DFL || before[i].sa_handler == SIG_IGN) {
      printf("%s had no handler\n", names[i]);
      return -1;
    }
    if (now.sa_sigaction == before[i].sa_sigaction && now.sa_flags == before[i].sa_flags && same(&now.sa_mask, &before[i].sa_mask))
      continue;
    printf("%s has another handler\n", names[i]);
    ++others;
  }
  return others;
}

static int failed(whale_status* status) {
  if (status == NULL) return 0;
  whale_str text = whale_status_message(status);
  printf("whale: %.*s\n", (int)text.size, text.data);
  return 1;
}
#define TRY(call) \
  if (failed(call)) return 1

/* 0, or 1 and it has been said why. */
int train(void) {
  whale_engine* engine;
  whale_graph* g;
  whale_world* world;
  whale_cluster* cluster;
  whale_plan* plan;
  whale_session* session;
  const int64_t x_dims[] = {BATCH, IN}, y_dims[] = {BATCH}, w_dims[] = {IN, OUT};
  whale_value x, w, in[2], out[3];
  size_t n;
  TRY(whale_engine_create(NULL, &engine));
  TRY(whale_world_create(engine, NULL, &world));
  TRY(whale_graph_create(engine, WHALE_STR("host"), &g));
  TRY(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, x_dims, 2, 0, &x));
  TRY(whale_graph_input(g, WHALE_STR("y"), WHALE_I32, y_dims, 1, 0, &in[1]));
  whale_scope_options replica = WHALE_SCOPE_OPTIONS_INIT;
  replica.kind = WHALE_SCOPE_REPLICA;
  TRY(whale_graph_scope_begin(g, &replica));
  whale_parameter_options normal = WHALE_PARAMETER_OPTIONS_INIT;
  normal.init = WHALE_INIT_NORMAL, normal.b = 0.1;
  TRY(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, w_dims, 2, &normal, &w));
  const whale_value xw[] = {x, w};
  TRY(whale_graph_op(g, WHALE_STR("matmul"), xw, 2, NULL, 0, NULL, out, 3, &n));
  in[0] = out[0];
  TRY(whale_graph_op(g, WHALE_STR("cross_entropy"), in, 2, NULL, 0, NULL, out, 3, &n));
  TRY(whale_graph_op(g, WHALE_STR("reduce_mean"), out, 1, NULL, 0, NULL, in, 2, &n));
  TRY(whale_graph_scope_end(g));
  whale_training_options training = WHALE_TRAINING_OPTIONS_INIT;
  training.optimizer = WHALE_OPTIMIZER_ADAM;
  TRY(whale_graph_minimize(g, in[0], &training));
  TRY(whale_graph_seal(g));
  TRY(whale_cluster_create(engine, WHALE_STR("cpu:2"), &cluster));
  TRY(whale_plan_create(engine, g, cluster, NULL, &plan));
  whale_session_options options = WHALE_SESSION_OPTIONS_INIT;
  options.world = world;
  TRY(whale_session_create(engine, plan, &options, &session));
  static float points[BATCH][IN] = {{1}, {0, 1}, {0, 0, 1}};
  static int32_t labels[BATCH] = {0, 1, 2};
  whale_tensor *fed[2], *fetched = NULL;
  int32_t inputs[2], output, done;
  TRY(whale_session_input(session, WHALE_STR("x"), &inputs[0]));
  TRY(whale_session_input(session, WHALE_STR("y"), &inputs[1]));
  TRY(whale_session_output(session, WHALE_STR("loss"), &output));
  TRY(whale_tensor_view(WHALE_F32, x_dims, 2, points, &fed[0]));
  TRY(whale_tensor_view(WHALE_I32, y_dims, 1, labels, &fed[1]));
  for (int step = 0; step < 5; ++step) {
    whale_event* event;
    TRY(whale_session_step(session, inputs, fed, 2, &output, &fetched, 1, NULL, &event));
    TRY(whale_event_wait(event, -1, &done));
    whale_event_release(event);
  }
  printf("rank %d of %d: loss %.9g\n", whale_world_rank(world), whale_world_size(world), *(const float*)whale_tensor_data(fetched));
  const int others = other_handlers(); /* while all of it is open */
  whale_tensor_release(fetched);
  whale_tensor_release(fed[0]);
  whale_tensor_release(fed[1]);
  whale_session_release(session);
  whale_plan_release(plan);
  whale_cluster_release(cluster);
  whale_graph_release(g);
  whale_world_release(world);
  whale_engine_release(engine);
  fflush(stdout);
  return others != 0 || other_handlers() != 0;
}
