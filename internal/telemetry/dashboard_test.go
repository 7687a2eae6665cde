package telemetry_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/assert/yaml"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// series is a time series of Prometheus: the metric of the library that it shows, and the
// labels with their values.
type series struct {
	metric string
	labels map[string][]string
}

// add adds the attributes of a point, named as Prometheus names them.
func (s series) add(set attribute.Set) {
	for _, a := range set.ToSlice() {
		label := underscored(string(a.Key))
		s.labels[label] = append(s.labels[label], a.Value.String())
	}
}

func underscored(name string) string { return strings.ReplaceAll(name, ".", "_") }

// exported returns every series of the library by its name in Prometheus. The names follow
// the rules of OpenTelemetry for Prometheus, with the suffixes of units and types.
func exported(t *testing.T) map[string]series {
	reader := metric.NewManualReader()
	meters := metric.NewMeterProvider(metric.WithReader(reader))
	tel, err := telemetry.New(tracenoop.NewTracerProvider(), meters, strings.Clone)
	require.NoError(t, err)
	for _, err := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, errBoom} {
		ctx, span := tel.StartAcquire(t.Context(), orders)
		span.End(ctx, 1, true, err)
	}
	for _, reason := range []lock.Reason{lock.ReasonExpired, lock.ReasonGone, lock.ReasonMaxHold, lock.ReasonClosed} {
		lifecycle(t.Context(), tel, orders, errBoom, &lock.LostError{Name: "orders", Reason: reason})
	}
	var data metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &data))
	require.Len(t, data.ScopeMetrics, 1)
	all := map[string]series{}
	for _, m := range data.ScopeMetrics[0].Metrics {
		name, s := underscored(m.Name), series{m.Name, map[string][]string{"job": nil, "instance": nil}}
		if m.Unit == "s" {
			name += "_seconds"
		}
		switch d := m.Data.(type) {
		case metricdata.Sum[int64]:
			for _, p := range d.DataPoints {
				s.add(p.Attributes)
			}
			if d.IsMonotonic {
				name += "_total"
			}
			all[name] = s
		case metricdata.Histogram[float64]:
			for _, p := range d.DataPoints {
				s.add(p.Attributes)
			}
			all[name+"_sum"], all[name+"_count"] = s, s
			bucket := series{m.Name, maps.Clone(s.labels)}
			bucket.labels["le"] = nil
			all[name+"_bucket"] = bucket
		default:
			t.Fatalf("%s: no rule for %T", m.Name, d)
		}
	}
	return all
}

var (
	selector = regexp.MustCompile(`(\w+)\{([^{}]*)\}`)
	matcher  = regexp.MustCompile(`^\s*(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"\s*$`)
	grouping = regexp.MustCompile(`\b(?:by|on)\s*\(([^()]*)\)`)
	variable = regexp.MustCompile(`^label_values\((.*),\s*(\w+)\)$`)
	skipped  = regexp.MustCompile(`\[[^\]]*\]|\b\d[\w.]*`) // ranges, numbers and durations
	word     = regexp.MustCompile(`\w+`)
	template = regexp.MustCompile(`\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}`)
)

// operators are the words of PromQL that the expressions may use.
var operators = strings.Fields("and or unless offset sum topk rate increase histogram_quantile")

// query is an expression and what is wrong with it.
type query struct {
	all      map[string]series // of the library
	kinds    string            // a text that contains every kind of lock in quotes
	used     []series
	groups   []string // the labels of the result
	problems []string
}

func (q *query) complain(format string, args ...any) {
	q.problems = append(q.problems, fmt.Sprintf(format, args...))
}

// use notes the use of a series and returns it.
func (q *query) use(name string) series {
	s, known := q.all[name]
	if !known {
		q.complain("no series %s", name)
	}
	q.used = append(q.used, s)
	return s
}

// match checks the matchers of a selector, like redlatch_holds{job="a"}, and returns "".
func (q *query) match(text string) string {
	parts := selector.FindStringSubmatch(text)
	s := q.use(parts[1])
	for condition := range strings.SplitSeq(parts[2], ",") {
		m := matcher.FindStringSubmatch(condition)
		if m == nil {
			q.complain("malformed: %s", condition)
			continue
		}
		known, found := s.labels[m[1]]
		if !found {
			q.complain("%s has no label %s", parts[1], m[1])
		}
		for value := range strings.SplitSeq(m[2], "|") {
			switch {
			case value == "", strings.HasPrefix(value, "$"), slices.Contains(known, value):
			case m[1] == "redlatch_kind" && strings.Contains(q.kinds, `"`+value+`"`):
			default:
				q.complain("%s is never %q", m[1], value)
			}
		}
	}
	return ""
}

// group notes the labels of a grouping, like "by (job)", and returns "".
func (q *query) group(text string) string {
	q.groups = append(q.groups, word.FindAllString(grouping.FindStringSubmatch(text)[1], -1)...)
	return ""
}

// examine checks an expression against the series of the library. It knows as much of PromQL as
// the dashboard and the alerts use.
func examine(expr string, all map[string]series, kinds string) *query {
	q := &query{all: all, kinds: kinds}
	rest := strings.TrimSpace(expr)
	if m := variable.FindStringSubmatch(rest); m != nil {
		rest, q.groups = m[1], []string{m[2]}
	}
	rest = selector.ReplaceAllStringFunc(rest, q.match)
	rest = grouping.ReplaceAllStringFunc(rest, q.group)
	rest = skipped.ReplaceAllString(rest, "")
	for _, name := range word.FindAllString(rest, -1) {
		if !slices.Contains(operators, name) {
			q.use(name)
		}
	}
	for _, label := range q.groups {
		for _, s := range q.used {
			if _, found := s.labels[label]; !found && label != "le" {
				q.complain("%s has no label %s", s.metric, label)
			}
		}
	}
	if strings.Count(expr, "(") != strings.Count(expr, ")") {
		q.complain("unbalanced parentheses")
	}
	if strings.Contains(expr, "histogram_quantile") && !slices.Contains(q.groups, "le") {
		q.complain("histogram_quantile needs the label le")
	}
	return q
}

// kindsInSource returns the source of the packages whose locks have kinds.
func kindsInSource(t *testing.T) string {
	var source strings.Builder
	for _, folder := range []string{"rlock", "rwlock", "fairlock", "multilock", "semaphore"} {
		files, err := filepath.Glob("../../" + folder + "/*.go")
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			source.Write(text)
		}
	}
	return source.String()
}

// checkText verifies that a text with templates names only labels that the query returns.
func checkText(t *testing.T, q *query, text string) {
	for _, m := range template.FindAllStringSubmatch(text, -1) {
		assert.Contains(t, q.groups, m[1], text)
	}
}

type panel struct {
	ID                       int
	Type, Title, Description string
	Datasource               struct{ UID string }
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []struct{ Expr, LegendFormat string }
}

// check verifies the queries of a panel and marks the metrics that it shows.
func (p panel) check(t *testing.T, all map[string]series, kinds string, shown map[string]bool) {
	if p.Type == "row" {
		return
	}
	assert.NotEmpty(t, p.Description, p.Title)
	assert.NotEmpty(t, p.Targets, p.Title)
	assert.Equal(t, "${datasource}", p.Datasource.UID, p.Title)
	for _, target := range p.Targets {
		q := examine(target.Expr, all, kinds)
		assert.Empty(t, q.problems, "%s: %s", p.Title, target.Expr)
		checkText(t, q, target.LegendFormat)
		for _, s := range q.used {
			shown[s.metric] = true
		}
	}
}

func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations/grafana-dashboard.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels     []panel
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &dashboard))
	all, kinds := exported(t), kindsInSource(t)
	variables := []string{"__rate_interval", "__range", "__all"} // Grafana's own
	for _, v := range dashboard.Templating.List {
		variables = append(variables, v.Name)
		if v.Type == "query" {
			assert.Empty(t, examine(v.Definition, all, kinds).problems, v.Definition)
		}
	}
	for _, m := range regexp.MustCompile(`\$\{?(\w+)`).FindAllSubmatch(text, -1) {
		assert.Contains(t, variables, string(m[1]), "a variable that the dashboard does not have")
	}
	shown, ids, cells := map[string]bool{}, map[int]bool{}, map[[2]int]bool{}
	for _, p := range dashboard.Panels {
		p.check(t, all, kinds, shown)
		assert.False(t, ids[p.ID], "%s: another panel has its id", p.Title)
		ids[p.ID] = true
		for at := range p.GridPos.W * p.GridPos.H {
			cell := [2]int{p.GridPos.X + at%p.GridPos.W, p.GridPos.Y + at/p.GridPos.W}
			assert.Less(t, cell[0], 24, "%s: too far to the right", p.Title)
			assert.False(t, cells[cell], "%s: covers another panel", p.Title)
			cells[cell] = true
		}
	}
	for _, s := range all {
		assert.True(t, shown[s.metric], "%s has no panel", s.metric)
	}
}

func TestAlerts(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations/prometheus-alerts.yml")
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(text, &file))
	all, kinds := exported(t), kindsInSource(t)
	names := map[string]bool{}
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			assert.False(t, names[rule.Alert], "%s exists twice", rule.Alert)
			names[rule.Alert] = true
			q := examine(rule.Expr, all, kinds)
			assert.Empty(t, q.problems, rule.Alert)
			assert.Contains(t, []string{"critical", "warning", "info"}, rule.Labels["severity"], rule.Alert)
			for _, annotation := range []string{"summary", "description"} {
				assert.NotEmpty(t, rule.Annotations[annotation], rule.Alert)
				checkText(t, q, rule.Annotations[annotation])
			}
		}
	}
	assert.NotEmpty(t, names)
}

func TestBadExpressionsAreNoticed(t *testing.T) {
	all, kinds := exported(t), kindsInSource(t)
	for _, good := range []string{
		`sum by (redlatch_kind) (rate(redlatch_polls_total{redlatch_kind!~"spin|write", job=~"$job"}[5m])) > 0.5`,
		`histogram_quantile(0.99, sum by (le) (rate(redlatch_hold_duration_seconds_bucket[$__rate_interval])))`,
		`label_values(redlatch_holds{job=~"$job"}, instance)`,
	} {
		assert.Empty(t, examine(good, all, kinds).problems, good)
	}
	for _, bad := range []string{
		`redlatch_hold`,
		`sum(rate(redlatch_losses[5m]))`,
		`sum(redlatch_acquire_duration_bucket)`,
		`rate(redlatch_polls_total{redlatch_outcome="acquired"}[5m])`,
		`rate(redlatch_acquisitions_total{redlatch_outcome="lost"}[5m])`,
		`rate(redlatch_polls_total{redlatch_kind="spinning"}[5m])`,
		`rate(redlatch_losses_total{redlatch_reason}[5m])`,
		`sum by (redlatch_reason) (redlatch_holds)`,
		`sum by (redlatch_kind) (rate(redlatch_hub_reconnects_total[5m]))`,
		`rates(redlatch_polls_total[5m])`,
		`sum(rate(redlatch_polls_total[5m])`,
		`histogram_quantile(0.99, rate(redlatch_hold_duration_seconds_bucket[5m]))`,
		`label_values(redlatch_holds, redlatch_outcome)`,
	} {
		assert.NotEmpty(t, examine(bad, all, kinds).problems, bad)
	}
}
